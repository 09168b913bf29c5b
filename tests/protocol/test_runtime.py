"""The runtime folder: private, short enough for sockets, found by clients, cleared of what the dead left."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import runtime
from protocol.runtime import Endpoints, RuntimeFolderError

ENDPOINTS = Endpoints(client="ipc://c", worker="ipc://w", control="ipc://k", pid=1)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEPLANE_RUNTIME", str(tmp_path / "root"))
    return tmp_path / "root"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_its_user_may_enter(base: Path) -> None:
    old = os.umask(0)
    try:
        folder = runtime.create()
    finally:
        os.umask(old)
    assert mode(base) == 0o700 and mode(folder) == 0o700
    runtime.remove(folder)


def test_a_root_open_to_others_is_closed(base: Path) -> None:
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    runtime.root()
    assert mode(base) == 0o700


def test_a_link_or_file_in_its_place_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RuntimeFolderError, match="not a folder of this user"):
        runtime.root()


def test_socket_paths_fit_however_long_the_root_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    monkeypatch.setenv("PAGEPLANE_RUNTIME", str(long))
    folder = runtime.create()
    try:
        for name in ("client.sock", "worker.sock", "control.sock"):
            assert len(os.fsencode(folder / name)) <= runtime.MAX_SOCKET_PATH
        assert mode(folder) == 0o700
        runtime.publish(folder, ENDPOINTS)
        assert runtime.read_endpoints() == ENDPOINTS, "found through `current` all the same"
    finally:
        runtime.remove(folder)
    assert not folder.exists() and not (long / "current").is_symlink()


def test_the_newest_deployment_is_the_one_found(base: Path) -> None:
    first, second = runtime.create(), runtime.create()
    runtime.publish(first, ENDPOINTS)
    other = Endpoints(client="ipc://other", worker="w", control="k")
    runtime.publish(second, other)
    assert runtime.read_endpoints() == other
    assert runtime.read_endpoints(first) == ENDPOINTS
    runtime.remove(second)
    assert runtime.read_endpoints() == ENDPOINTS, "the older one runs still"
    runtime.remove(first)
    with pytest.raises(RuntimeFolderError, match="no running server found"):
        runtime.read_endpoints()


def test_removing_an_older_deployment_leaves_the_newest_found(base: Path) -> None:
    first, second = runtime.create(), runtime.create()
    runtime.publish(second, ENDPOINTS)
    runtime.remove(first)
    assert runtime.read_endpoints() == ENDPOINTS


def test_without_a_server_the_error_says_how_to_start_one(base: Path) -> None:
    with pytest.raises(RuntimeFolderError, match=r"python launch\.py"):
        runtime.read_endpoints()


def test_endpoints_that_are_none_are_named(base: Path) -> None:
    folder = runtime.create()
    (folder / "endpoints.json").write_text("{")
    with pytest.raises(RuntimeFolderError, match=r"endpoints\.json"):
        runtime.read_endpoints(folder)


def test_what_a_killed_server_left_is_recognised_and_cleared(base: Path) -> None:
    program = (
        "import os, signal\n"
        "from protocol import runtime\n"
        "folder = runtime.create()\n"
        "runtime.publish(folder, runtime.Endpoints('c', 'w', 'k'))\n"
        "print(folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    repository = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(repository)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    stale = Path(killed.stdout.strip())
    assert stale.is_dir()
    with pytest.raises(RuntimeFolderError):
        runtime.read_endpoints()
    folder = runtime.create()
    assert not stale.exists() and folder.is_dir()
    runtime.remove(folder)


def test_a_running_servers_folder_is_left_alone(base: Path) -> None:
    first = runtime.create()  # this very process owns it
    second = runtime.create()
    assert first.is_dir() and second.is_dir()
