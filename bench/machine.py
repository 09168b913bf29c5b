"""What the numbers were measured on: hardware, versions, and the state of this checkout."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def describe_machine() -> dict[str, str | int | None]:
    """Keys: cpu, cores (that this process may use), memory_gib, kernel, python, commit (with "+changes"), or None."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--exclude=*"],
            capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()
