"""Where the histograms of the scheduler have their borders: it counts by them, the gateway names them to Prometheus.

Upper bounds, inclusive; what is greater than the last falls into one more bucket. Latencies as vLLM has them.
"""

from __future__ import annotations

_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
_REQUEST_S = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
_PHASE_S = (0.001, 0.005, 0.01, 0.05, *_REQUEST_S)

INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0),
)
REQUEST_S = _REQUEST_S

BOUNDS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": FIRST_TOKEN_S,
    "inter_token_latency_seconds": INTER_TOKEN_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _PHASE_S,
    "request_prefill_time_seconds": _PHASE_S,
    "request_decode_time_seconds": _PHASE_S,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "iteration_tokens": _TOKENS,
    "plan_bytes": tuple(float(2**power) for power in range(5, 21)),
}
"""By name of the metric, without prefix."""

STAGES = ("schedule", "encode", "wire", "apply", "commit", "forward", "sample", "return", "result")
"""What a step goes through: the scheduler plans, encodes and sends; the plan travels; the worker applies it, commits
its block tables to the device, computes and samples; the result travels; the scheduler makes it count."""

STAGE_S = tuple(float(f"{base}e{power}") for power in range(-6, 1) for base in (1, 2.5, 5))
