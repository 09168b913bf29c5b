"""The runtime folder: where sockets, the configuration and the published endpoints of one deployment lie.

One folder per deployment under a 0700 root of the user; `current` points at the newest, so a client finds it unasked.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

import msgspec

MAX_SOCKET_PATH = 107
"""Longest path a Unix socket can have on Linux (sun_path is 108 bytes with its NUL)."""


class RuntimeFolderError(RuntimeError):
    """The folder is not ours, not private, or there is none; the message says which."""


class Endpoints(msgspec.Struct, frozen=True):
    """Addresses as actually bound."""

    client: str
    worker: str
    control: str
    pid: int = 0


def root() -> Path:
    """The user's root, 0700: $PAGEPLANE_RUNTIME, or pageplane in $XDG_RUNTIME_DIR, or /tmp/pageplane-<uid>."""
    named = os.environ.get("PAGEPLANE_RUNTIME")
    if named:
        return _private(Path(named))
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg and Path(xdg).is_dir():
        return _private(Path(xdg) / "pageplane")
    return _private(Path(tempfile.gettempdir()) / f"pageplane-{os.getuid()}")


def create() -> Path:
    """A fresh folder whose socket paths fit; becomes `current`. What a supervisor killed with -9 left is removed."""
    base = root()
    for old in base.iterdir():
        if old.is_dir() and not old.is_symlink() and not _owned(old):
            shutil.rmtree(old, ignore_errors=True)
    folder = base / secrets.token_hex(4)
    if len(os.fsencode(folder / "control.sock")) > MAX_SOCKET_PATH:
        folder = Path(tempfile.mkdtemp(prefix="pp-", dir="/tmp"))
        if len(os.fsencode(folder / "control.sock")) > MAX_SOCKET_PATH:
            raise RuntimeFolderError(f"no runtime folder with socket paths of at most {MAX_SOCKET_PATH} bytes")
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "owner").write_text(str(os.getpid()))
    _make_current(folder)
    return folder


def remove(folder: Path) -> None:
    """Remove the folder. If it was `current`, the newest of the deployments that still run takes its place."""
    shutil.rmtree(folder, ignore_errors=True)
    link = root() / "current"
    if not link.is_symlink() or link.readlink() != folder:
        return
    others = [path.parent for path in root().glob("[!.]*/endpoints.json") if path.parent != link]
    running = [other for other in others if _owned(other)]
    if running:
        _make_current(max(running, key=lambda other: other.stat().st_mtime))
    else:
        link.unlink(missing_ok=True)


def _make_current(folder: Path) -> None:
    base = root()
    link = base / f".current-{secrets.token_hex(4)}"
    link.symlink_to(folder)
    link.replace(base / "current")


def alive(pid: int) -> bool:
    """Whether this process runs (a zombie does not)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # another user's
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True  # no /proc, or it ended just now
    return state not in ("Z", "X")


def publish(folder: Path, endpoints: Endpoints) -> None:
    """Write endpoints.json whole or not at all."""
    temporary = folder / ".endpoints.json"
    temporary.write_bytes(msgspec.json.encode(endpoints))
    temporary.replace(folder / "endpoints.json")


def read_endpoints(folder: Path | None = None) -> Endpoints:
    """Endpoints of a deployment; None: the current one. Raises RuntimeFolderError when none is running there."""
    path = (folder or root() / "current") / "endpoints.json"
    if path.exists() and not _owned(path.parent):
        raise RuntimeFolderError(
            f"the server of {path.parent.resolve()} was killed; start one with: python launch.py --workers 2"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Endpoints)
    except FileNotFoundError:
        raise RuntimeFolderError(
            f"no running server found ({path} does not exist); start one with: python launch.py --workers 2"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise RuntimeFolderError(f"{path}: {error}") from None


def _owned(folder: Path) -> bool:
    """Whether the process that created this folder may still live."""
    try:
        return alive(int((folder / "owner").read_text()))
    except (OSError, ValueError):
        return True  # just being created, or not ours to judge


def _private(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeFolderError(f"runtime folder {path}: {error.strerror}") from None
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise RuntimeFolderError(f"{path} is not a folder of this user")
    if info.st_mode & 0o077:
        path.chmod(0o700)
    return path
