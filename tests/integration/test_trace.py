"""Traces and profiles of real processes: `--trace FILE`, `python -m client trace`, `python -m client profile`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from client import ClientError, SamplingParams
from tests.integration.deployment import Deployment
from tests.tiny_model import tiny_model
from tests.trace_reader import Trace, read_file

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
STAGES = ("schedule", "encode", "apply", "commit", "forward", "sample", "result")


def check_steps(trace: Trace) -> None:
    """Every step was planned, sent, computed and taken up, in this order, by two processes."""
    workers = [pid for pid, name in trace.processes.items() if name.startswith("worker-0")]
    steps = [piece for piece in trace.threads[workers[-1], 1] if piece.name.startswith("step ")]
    assert len(steps) > 5
    counts = {name: len(trace.named(name)) for name in STAGES}
    assert set(counts.values()) == {len(steps)}, counts
    assert trace.arrows == 2 * len(steps)
    names = ("schedule", "encode", "apply", "result")
    for moments in zip(*(sorted(piece.ts for piece in trace.named(name)) for name in names), strict=True):
        assert list(moments) == sorted(moments), "clocks of both processes agree"
    for step in steps:
        assert step.args["kernel calls"]["paged_attention"] == 2, "once in each layer"


@contextmanager
def asking(deployment: Deployment) -> Iterator[None]:
    """One request after the other, meanwhile."""
    done = threading.Event()

    def ask() -> None:
        count = 0
        while not done.is_set():
            deployment.client.complete([6] * 9, SAMPLING, request_id=f"asked {count}", detokenize=False)
            count += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def check_live_trace(deployment: Deployment, path: Path) -> Trace:
    with asking(deployment):
        ran = deployment.run_client("trace", "--seconds", "0.5", "-o", str(path))
    assert ran.returncode == 0 and f"events in {path}" in ran.stderr, ran.stderr
    refused = deployment.run_client("trace", "--seconds", "0", "-o", str(path.with_name("none.json")))
    assert refused.returncode == 1 and "seconds" in refused.stderr
    trace = read_file(path)
    check_steps(trace)
    assert any(piece[0].name.startswith("asked") for piece in trace.asynchronous.values())
    return trace


def check_profile(deployment: Deployment) -> None:
    with asking(deployment):
        ran = deployment.run_client("profile", "--steps", "5", "--rows", "100")
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"worker-0, 5 steps of [\d.,]+ ms, cpu time", ran.stdout), ran.stdout
    calls = {name: float(count) for count, name in re.findall(r"│ +([\d.]+) │ (cpu::\w+|step, outside) ?", ran.stdout)}
    of_two_layers = {"cpu::paged_attention": 2.0, "cpu::rotate_and_write_kv": 2.0}
    assert calls == of_two_layers | {"step, outside": 1.0}
    shares = [float(share) for share in re.findall(r"│ +([\d.]+)% │", ran.stdout)]
    assert shares and abs(sum(shares) - 100) < 0.1 * len(shares), "of the time of all"


def check_killed_profile(deployment: Deployment) -> None:
    """A second profile is refused while one is taken; the first hears that its worker died."""
    outcome: list[ClientError] = []

    def profile() -> None:
        try:
            deployment.client.profile(0, steps=1, seconds=60)
        except ClientError as error:
            outcome.append(error)

    waiting = threading.Thread(target=profile)
    waiting.start()

    def second_is_refused() -> bool:
        ran = deployment.run_client("profile", "--seconds", "0.1")
        return ran.returncode == 1 and "is being profiled already" in ran.stderr

    deployment.wait_until(second_is_refused, 30, "a profile is taken")
    deployment.kill("worker-0")
    waiting.join(30)
    assert len(outcome) == 1 and "worker-0 was lost while it was profiled" in str(outcome[0]), outcome


def test_traces_and_profiles_of_a_deployment(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    flags = (
        "--model",
        str(tiny_model()),
        "--workers",
        "1",
        "--kv-memory",
        "16MiB",
        "--trace",
        str(tmp_path / "t.json"),
    )
    with Deployment(tmp_path / "d", *flags) as deployment:
        deployment.client.complete([5] * 40, SAMPLING, request_id="first", detokenize=False)
        live = check_live_trace(deployment, tmp_path / "live.json")
        check_profile(deployment)
        check_killed_profile(deployment)
    whole = read_file(tmp_path / "t.json")
    phases = whole.phases("first")
    assert [piece.name for piece in phases] == ["first", "queue", "prefill", "decode"]
    assert phases[0].args["reason"] == "length" and phases[0].args["output tokens"] == 8
    assert len(live.named("result")) < len(whole.named("result"))
    assert live.processes.items() <= whole.processes.items()
    assert [lost["worker"] for lost in whole.marks["worker lost"]] == ["worker-0"]
