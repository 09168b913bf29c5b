"""Runtime folders of deployments that come, go and are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import runtime


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEPLANE_RUNTIME", str(tmp_path / "run"))
    return tmp_path / "run"


def publish(folder: Path, name: str) -> None:
    runtime.publish(folder, runtime.Endpoints(name, "", ""))


def test_newest_deployment_is_current_and_the_one_before_when_it_ends(root: Path) -> None:
    first, second = runtime.create(), runtime.create()
    publish(first, "first")
    publish(second, "second")
    assert runtime.read_endpoints().client == "second"
    runtime.remove(second)
    assert runtime.read_endpoints().client == "first"
    runtime.remove(first)
    assert list(root.iterdir()) == []
    with pytest.raises(runtime.RuntimeFolderError, match="no running server"):
        runtime.read_endpoints()


def test_ending_an_older_deployment_leaves_the_current_one() -> None:
    first, second = runtime.create(), runtime.create()
    publish(second, "second")
    runtime.remove(first)
    assert runtime.read_endpoints().client == "second"


def test_what_a_killed_supervisor_left_is_removed_by_the_next(root: Path) -> None:
    code = "from protocol import runtime; print(runtime.create())"
    left = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    assert left.is_dir()
    publish(left, "left")
    with pytest.raises(runtime.RuntimeFolderError, match="was killed; start one with"):
        runtime.read_endpoints()
    mine = runtime.create()
    assert not left.exists() and mine.is_dir()


def test_folder_is_private_and_socket_paths_fit(root: Path) -> None:
    folder = runtime.create()
    assert folder.stat().st_mode & 0o077 == 0 and root.stat().st_mode & 0o077 == 0
    assert len(os.fsencode(folder / "control.sock")) <= runtime.MAX_SOCKET_PATH


def test_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected it
    assert not runtime.alive(process.pid)
    process.wait()
    assert not runtime.alive(process.pid)
    assert runtime.alive(os.getpid())
