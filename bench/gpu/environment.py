"""What is installed and which GPU there is. Without a network, missing packages come from a folder of wheels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "triton", "numpy", "numba", "msgspec", "pyzmq", "psutil", "safetensors", "tokenizers", "transformers",
    "gguf", "llguidance", "pytest", "pytest-xdist", "hypothesis", "rich",
)  # fmt: skip


class CannotInstall(Exception):
    """The wheels could not be installed; the message is pip's."""


def missing_modules(names: tuple[str, ...], extra: Path | None = None) -> list[str]:
    """Those that cannot be imported, here or from the folder `extra`."""
    found_there = {path.name.partition(".")[0] for path in extra.iterdir()} if extra is not None else set()
    return [name for name in names if name not in found_there and importlib.util.find_spec(name) is None]


def install(wheels: Path, target: Path) -> None:
    """Every wheel of a folder, unpacked into `target`; nothing is fetched, nothing of this machine is changed.

    Raises CannotInstall.
    """
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    if not files:
        raise CannotInstall(f"no *.whl in {wheels}")
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile",
            "--disable-pip-version-check", "--target", str(target), *files,
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise CannotInstall(done.stderr.strip() or f"pip ended with code {done.returncode}")


def describe() -> dict[str, Any]:
    """Keys: python, platform, packages (name → version or null), gpus (lines of nvidia-smi -L), cuda_visible."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "gpus": _gpus(),
        "cuda_visible": cuda_visible(),
    }


def cuda_visible() -> bool:
    """Whether torch, in a process of its own, sees a CUDA device: this one takes no part of the GPU."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"], capture_output=True
    )
    return done.returncode == 0


def _gpus() -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
