"""A child process that must not outlive its supervisor ties itself to it here (Linux PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SUPERVISOR_ENV = "PAGEPLANE_SUPERVISOR_PID"


def die_with_supervisor() -> None:
    """Ask the kernel for SIGKILL when the parent dies; exit at once if it died before we could ask."""
    supervisor = os.environ.get(SUPERVISOR_ENV)
    if not supervisor or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(supervisor):
        os._exit(1)
