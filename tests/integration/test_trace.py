"""Traces of real processes: `--trace FILE` of a whole deployment, and `python -m client trace` of a running one."""

from __future__ import annotations

import threading
from pathlib import Path

from client import SamplingParams
from tests.integration.deployment import Deployment
from tests.tiny_model import tiny_model
from tests.trace_reader import Trace, read_file

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


def test_a_deployments_trace_shows_every_request_and_step(tmp_path: Path) -> None:
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
    (tmp_path / "d").mkdir()
    with Deployment(tmp_path / "d", *flags) as deployment:
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        deployment.client.complete([5] * 40, sampling, request_id="first", detokenize=False)
        taken = tmp_path / "live.json"
        done = threading.Event()

        def ask() -> None:
            count = 0
            while not done.is_set():
                deployment.client.complete([6] * 9, sampling, request_id=f"asked {count}", detokenize=False)
                count += 1

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            ran = deployment.run_client("trace", "--seconds", "0.5", "-o", str(taken))
        finally:
            done.set()
            asking.join()
        assert ran.returncode == 0 and f"events in {taken}" in ran.stderr, ran.stderr
        refused = deployment.run_client("trace", "--seconds", "0", "-o", str(tmp_path / "none.json"))
        assert refused.returncode == 1 and "seconds" in refused.stderr
        deployment.wait_idle()
    whole = read_file(tmp_path / "t.json")
    check_steps(whole)
    phases = whole.phases("first")
    assert [piece.name for piece in phases] == ["first", "queue", "prefill", "decode"]
    assert phases[0].args["reason"] == "length" and phases[0].args["output tokens"] == 8
    live = read_file(taken)
    check_steps(live)
    assert any(piece[0].name.startswith("asked") for piece in live.asynchronous.values())
    assert len(live.named("result")) < len(whole.named("result"))
    assert live.processes == whole.processes
