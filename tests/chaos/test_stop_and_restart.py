"""Stopping a deployment, killing its supervisor, killing its scheduler: what users and their requests see of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from client import AsyncClient
from client.errors import RequestLost, ServerUnavailable
from tests.chaos.conftest import WORKERS
from tests.chaos.streams import NEVER_ATTACH_S, Recording, Wish, answers, record, run, wishes
from tests.integration.deployment import ROOT, STOP_S, Deployment


def long_wishes(count: int) -> list[Wish]:
    """More tokens than any test waits for."""
    return wishes(count, max_tokens=8000)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_under_load_is_orderly_and_tells_the_clients(
    tmp_path: Path, tiny_folder: Path, number: signal.Signals
) -> None:
    """Exit code 0 within five seconds, no process left, and every stream ends with "abort" after the tokens it had."""
    server = Deployment(tmp_path, "--model", str(tiny_folder), "--workers", "1", "--kv-memory", "32MiB")
    server.start()
    try:

        async def main() -> list[Recording]:
            async with AsyncClient(server.endpoints["client"], silence_s=NEVER_ATTACH_S) as client:
                started = asyncio.Event()
                count = 8
                running: set[int] = set()

                def look(recording: Recording) -> None:
                    running.add(id(recording))
                    if len(running) == count:
                        started.set()

                streams = [asyncio.create_task(record(client, wish, look)) for wish in long_wishes(count)]
                await started.wait()
                await asyncio.to_thread(server.stop, number)
                return list(await asyncio.wait_for(asyncio.gather(*streams), STOP_S))

        for answer in answers(asyncio.run(main())):
            assert answer.reason == "abort"
            assert answer.usage.completion_tokens == len(answer.tokens) > 0
        assert not server.ready_file.exists()
        assert not list((tmp_path / "run").iterdir())
    finally:
        server.destroy()


def test_stop_during_the_start_is_orderly(tmp_path: Path, tiny_folder: Path) -> None:
    server = Deployment(tmp_path, "--model", str(tiny_folder), "--workers", "2")
    with open(server.log, "wb") as log:
        server.process = subprocess.Popen(server.command, stdout=log, stderr=log, env=server.environment)
    try:
        server.wait_until(lambda: "worker-1 started" in server.text, 30, "workers start")
        server.stop(signal.SIGINT)
        assert not list((tmp_path / "run").iterdir())
    finally:
        server.destroy()


def test_supervisor_killed_with_9_takes_everything_along(tmp_path: Path, tiny_folder: Path) -> None:
    """Also in the middle of work; and the next start clears away what it left and serves."""
    flags = ("--model", str(tiny_folder), "--workers", "1", "--kv-memory", "32MiB")
    server = Deployment(tmp_path, *flags)
    server.start()
    try:
        assert server.process is not None
        family = [psutil.Process(pid) for pid in server.pids.values()]

        async def main() -> None:
            async with AsyncClient(server.endpoints["client"], silence_s=0.5, timeout_s=1.0) as client:
                started = asyncio.Event()
                stream = asyncio.create_task(record(client, long_wishes(1)[0], lambda recording: started.set()))
                await started.wait()
                os.kill(server.process.pid, signal.SIGKILL)
                with pytest.raises(ServerUnavailable, match=r"no answer from the server at ipc://\S+ within 1 s"):
                    await stream

        asyncio.run(main())
        _, alive = psutil.wait_procs(family, timeout=3)
        assert not alive
        assert not server.survivors()
        server.process.wait()

        talk = server.run_client("hello")
        assert talk.returncode == 1
        assert "was killed; start one with: python launch.py" in talk.stderr

        left = {path.name for path in (tmp_path / "run").iterdir()}
        server.ready_file.unlink()
        server.start()
        assert run(server.endpoints["client"], wishes(1, 8))[0].reason == "length"
        assert not left & {path.name for path in (tmp_path / "run").iterdir() if path.name != "current"}
        server.stop()
    finally:
        server.destroy()


def test_killed_scheduler_loses_requests_with_an_error_and_serves_again(server: Deployment) -> None:
    """A stream in flight ends with an error that says so; the ready file names the new processes; requests work."""
    before = server.pids

    async def main() -> None:
        async with AsyncClient(server.endpoints["client"], silence_s=1.0, timeout_s=20.0) as client:
            started = asyncio.Event()
            stream = asyncio.create_task(record(client, long_wishes(1)[0], lambda recording: started.set()))
            await started.wait()
            os.kill(before["scheduler"], signal.SIGKILL)
            with pytest.raises(RequestLost, match=r"the server was restarted and lost request \w+; send it again"):
                await asyncio.wait_for(stream, 20)

    asyncio.run(main())
    server.close_client()  # a connection of the test itself, so that its view begins anew
    server.wait_in_service(WORKERS, not_pids=[before[name] for name in WORKERS])
    assert not set(server.pids.values()) & set(before.values())
    assert set(server.pids) == set(before)
    assert run(server.endpoints["client"], wishes(2, 8))[0].reason == "length"
    assert not any(psutil.pid_exists(pid) for pid in before.values())


def test_worker_that_keeps_dying_is_reported_while_the_others_serve(tmp_path: Path, tiny_folder: Path) -> None:
    """worker-1 finds its weights damaged after a restart: it backs off, is named with its last words, and comes back
    once they are whole again."""
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_folder.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    weights = (model / "model.safetensors").read_bytes()
    (tmp_path / "folder").mkdir()
    flags = ("--model", str(model), "--workers", "2", "--kv-memory", "32MiB")
    with Deployment(tmp_path / "folder", *flags) as server:
        (model / "new").write_bytes(weights[:10_000])
        (model / "new").replace(model / "model.safetensors")  # never in place: the living worker has it mapped
        dead = server.kill("worker-1")
        reason = "worker-1 .* ended: exit code 78: .*model.safetensors is no readable safetensors file.*; restarted in"
        server.wait_until(lambda: re.search(reason, server.text), 30, "a failed restart")
        assert run(server.endpoints["client"], wishes(4, 8))[0].reason == "length"
        states = {worker.worker_id: worker.state for worker in server.status().workers}
        assert states == {"worker-0": "ready", "worker-1": "dead"}

        (model / "new").write_bytes(weights)
        (model / "new").replace(model / "model.safetensors")
        server.wait_in_service(WORKERS, not_pids=[dead], timeout_s=30)


def test_scheduler_imports_no_compute_library_and_stays_small(server: Deployment) -> None:
    """Under 100 MB, and nothing of torch, numba or triton is mapped into it."""
    run(server.endpoints["client"], wishes(8, 32))
    pid = server.pids["scheduler"]
    assert psutil.Process(pid).memory_info().rss < 100e6
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert not [name for name in ("libtorch", "/torch/", "llvmlite", "triton") if name in maps]
    code = "import sys, json, scheduler.server, scheduler.__main__; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout
    assert not {"torch", "numba", "triton", "transformers", "worker", "kernels", "client"} & set(json.loads(out))


def test_idle_deployment_sleeps(server: Deployment) -> None:
    """Scheduler, workers and supervisor together: under 5% of a core."""
    assert server.process is not None
    server.close_client()
    processes = [psutil.Process(pid) for pid in (server.process.pid, *server.pids.values())]

    def seconds() -> float:
        return sum(process.cpu_times().user + process.cpu_times().system for process in processes)

    before, began = seconds(), time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(3.0)
    assert (seconds() - before) / (time.monotonic() - began) < 0.05
