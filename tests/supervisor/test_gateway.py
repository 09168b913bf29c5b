"""The supervisor and its HTTP process: whatever becomes of that, the port is open and everything else goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from deployment import ROOT, Deployment

from protocol.config import EngineConfig
from supervisor.front_door import FrontDoor
from supervisor.prepare import StartFailed


def ask(deployment: Deployment) -> int:
    """Connect and read: the pid of the gateway that answered."""
    url = urlsplit(json.loads(deployment.ready_file.read_text())["endpoints"]["http"])
    assert url.hostname and url.port
    with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
        return int(connection.recv(100))


def test_a_gateway_that_hangs_is_replaced_and_what_waited_is_answered(tmp_path: Path) -> None:
    with Deployment(tmp_path, gateway="hang") as deployment:
        pids = deployment.wait_ready()
        assert ask(deployment) == pids["gateway"]
        began = time.monotonic()
        second = ask(deployment)  # it waits in the socket until the next gateway takes it
        assert second != pids["gateway"]
        assert time.monotonic() - began < 10
        deployment.wait_until(lambda: deployment.pids["gateway"] == second)
        assert "ended: hung: no beat for 1." in deployment.text
        assert {name: pid for name, pid in deployment.pids.items() if name != "gateway"} == {
            name: pid for name, pid in pids.items() if name != "gateway"
        }
        assert deployment.stop() < 5
        assert not deployment.survivors()


def test_a_gateway_that_is_killed_again_and_again_comes_back_each_time(tmp_path: Path) -> None:
    with Deployment(tmp_path, gateway="well") as deployment:
        seen = {deployment.wait_ready()["gateway"]}
        for _ in range(4):
            os.kill(ask(deployment), signal.SIGKILL)
            deployment.wait_until(lambda: deployment.pids["gateway"] not in seen)
            seen.add(deployment.pids["gateway"])
            assert ask(deployment) == deployment.pids["gateway"]
        supervisor = psutil.Process(deployment.process.pid)
        assert len([fd for fd in os.listdir(f"/proc/{supervisor.pid}/fd") if _is_pipe(supervisor.pid, fd)]) < 12


def _is_pipe(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("pipe:")
    except OSError:
        return False  # closed meanwhile


def test_a_gateway_that_cannot_start_is_reported_and_the_rest_serves(tmp_path: Path) -> None:
    with Deployment(tmp_path, gateway="fail") as deployment:
        pids = deployment.wait_ready()
        assert {"scheduler", "worker-0", "worker-1"} <= set(pids)
        deployment.wait_until(lambda: deployment.text.count("exit code 5: no module named gateway") >= 2)
        assert deployment.stop() < 5


def test_a_busy_port_is_told_at_once_with_what_to_do(tmp_path: Path) -> None:
    """Before a model is looked for or a process is started."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, str(ROOT / "launch.py"), "--model", str(tmp_path / "none"), "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PAGEPLANE_RUNTIME": str(tmp_path / "run")}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        f"launch.py: error: port {port} on 127.0.0.1 cannot be used for HTTP: Address already in use; "
        "choose another with --port (0: any that is free), or --no-gateway"
    )


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_told(host: str) -> None:
    with pytest.raises(StartFailed, match=host):
        FrontDoor.open(EngineConfig(host=host, port=0))


def test_nobody_but_this_machine_is_let_in_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    door = FrontDoor.open(EngineConfig(port=0))
    assert door.listener.getsockname()[0] == "127.0.0.1" and not caplog.records
    door.listener.close()
    door = FrontDoor.open(EngineConfig(host="0.0.0.0", port=0))
    assert "--api-key" in caplog.text
    door.listener.close()
