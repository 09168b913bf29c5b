"""The supervisor with real processes: start, deaths, restarts, and that nothing is ever left behind."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from deployment import Deployment


def test_ready_file_and_table_name_every_process(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        pids = deployment.wait_ready()
        assert set(pids) == {"scheduler", "worker-0", "worker-1"}
        assert {process.pid for process in deployment.family} == set(pids.values())
        for part in (
            *map(str, pids.values()),
            "cpu, float32",
            "worker-0, worker-1: scripted",
            "1,600",
            "python -m client",
        ):
            assert part in deployment.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signal_ends_everything_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.wait_ready()
        assert deployment.stop(number) < 5
        assert deployment.process.returncode == 0
        assert not deployment.survivors()
        assert not deployment.ready_file.exists()


def test_processes_that_ignore_the_request_to_stop_are_killed_within_5_s(tmp_path: Path) -> None:
    with Deployment(tmp_path, worker_0="deaf", scheduler="deaf") as deployment:
        deployment.wait_ready()
        assert deployment.stop() < 5
        assert deployment.process.returncode == 0
        assert not deployment.survivors()
        assert "killed, as it did not end when asked" in deployment.text


def test_second_stop_signal_does_not_wait(tmp_path: Path) -> None:
    with Deployment(tmp_path, worker_0="deaf", scheduler="deaf") as deployment:
        deployment.wait_ready()
        deployment.process.send_signal(signal.SIGINT)
        deployment.wait_until(lambda: "stopping" in deployment.text)
        assert deployment.stop(signal.SIGINT) < 2
        assert not deployment.survivors()


def test_killed_supervisor_takes_everything_with_it(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.wait_ready()
        deployment.stop(signal.SIGKILL)
        assert len(deployment.family) == 3
        assert not deployment.survivors()


def test_killed_worker_is_reported_at_once_and_restarted(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        pids = deployment.wait_ready()
        os.kill(pids["worker-1"], signal.SIGKILL)
        deployment.wait_until(lambda: deployment.pids["worker-1"] != pids["worker-1"])
        deployment.wait_until(lambda: "worker-1 is back in service" in deployment.text)
        after = deployment.pids
        assert (after["scheduler"], after["worker-0"]) == (pids["scheduler"], pids["worker-0"])
        (told,) = deployment.exits
        assert re.fullmatch(r"worker-1 [0-9a-f]{16} killed by SIGKILL", told)


def test_worker_killed_again_and_again_gets_a_new_incarnation_each_time(tmp_path: Path) -> None:
    with Deployment(tmp_path, workers=1) as deployment:
        deployment.wait_ready()
        for kill in range(1, 9):
            os.kill(deployment.pids["worker-0"], signal.SIGKILL)
            deployment.wait_until(lambda kill=kill: deployment.text.count("worker-0 is back in service") == kill)
        told = [line.split()[1] for line in deployment.exits]
        assert len(told) == len(set(told)) == 8


def test_descendants_of_a_dead_worker_die_with_it(tmp_path: Path) -> None:
    with Deployment(tmp_path, worker_0="family") as deployment:
        pids = deployment.wait_ready()
        grandchild = next(process for process in deployment.family if process.ppid() == pids["worker-0"])
        os.kill(pids["worker-0"], signal.SIGKILL)
        grandchild.wait(10)
        deployment.wait_until(lambda: "worker-0 is back in service" in deployment.text)
        assert deployment.stop() < 5
        assert not deployment.survivors()


def test_fenced_worker_is_killed_and_replaced(tmp_path: Path) -> None:
    with Deployment(tmp_path, worker_1="fenced") as deployment:
        deployment.wait_until(lambda: any("killed by SIGKILL: diverged" in line for line in deployment.exits))
        deployment.wait_ready()
        deployment.wait_until(lambda: deployment.text.count("worker-1 started") == 2)


def test_worker_that_cannot_start_does_not_keep_the_others(tmp_path: Path) -> None:
    with Deployment(tmp_path, worker_1="exit") as deployment:
        pids = deployment.wait_ready()
        assert "worker-0" in pids
        assert "not running: exit code 3: no memory for the KV cache" in deployment.text


def test_if_no_worker_can_start_it_fails_and_says_why(tmp_path: Path) -> None:
    with Deployment(tmp_path, worker_0="exit", worker_1="exit") as deployment:
        assert deployment.process.wait(30) == 1
        last = deployment.text.splitlines()[-1]
        why = "exit code 3: no memory for the KV cache"
        assert last == f"error: no worker can start: worker-0: {why}; worker-1: {why}"


def test_frozen_worker_fails_the_start_in_time(tmp_path: Path) -> None:
    with Deployment(tmp_path, workers=1, start_timeout_s=1.5, worker_0="freeze") as deployment:
        assert deployment.process.wait(15) == 1
        last = deployment.text.splitlines()[-1]
        assert last == "error: no worker can start: worker-0: not ready within 1.5 s"


def test_scheduler_that_cannot_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    with Deployment(tmp_path, scheduler="die") as deployment:
        assert deployment.process.wait(15) == 1
        last = deployment.text.splitlines()[-1]
        assert last == "error: scheduler ended: exit code 4: cannot listen on tcp://127.0.0.1:80: in use"


def test_killed_scheduler_is_restarted_with_all_workers(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        pids = deployment.wait_ready()
        os.kill(pids["scheduler"], signal.SIGKILL)
        deployment.wait_until(lambda: deployment.text.count("is back in service") == 2)
        assert "requests in flight are lost" in deployment.text
        after = deployment.pids
        assert not set(after.values()) & set(pids.values()) and set(after) == set(pids)
        assert deployment.stop() < 5
        assert not deployment.survivors()


def test_idle_supervisor_sleeps(tmp_path: Path) -> None:
    with Deployment(tmp_path) as deployment:
        deployment.wait_ready()
        supervisor = next(iter(deployment.family)).parent()
        assert supervisor is not None
        before = supervisor.cpu_times()
        deployment.process.send_signal(signal.SIGWINCH)  # a signal that is none of its business
        with pytest.raises(TimeoutError):
            _wait(deployment, 1.0)
        after = supervisor.cpu_times()
        assert (after.user + after.system) - (before.user + before.system) <= 0.03


def _wait(deployment: Deployment, seconds: float) -> None:
    """TimeoutError unless the supervisor ends within `seconds`."""
    import subprocess

    try:
        deployment.process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
