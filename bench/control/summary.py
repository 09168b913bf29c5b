"""What the sides answered, as medians, ratios and slopes. Pure.

The JSON of `bench control --json`, stable for `schema` 1 (keys may be added):
  schema, command, started_at (ISO 8601, UTC), machine (see bench/machine.py)
  sides    names, ours first
  rounds   how often each side ran each case, in turns
  cases    label -> metric -> side -> {median, min, max} of the rounds' values,
           and -> "ratio" -> {ratio, min, max}: ours / the other's
  decode_cases  label -> arguments of the decode cases
  slopes   side -> {base_us, per_row_us, per_block_us}: least squares over all steps of the one-group decode cases
Metrics: step_us (a result in, the next plan out), plan_bytes, encode_decode_us, block_ns (admission, for each block of
the prompt; `engine_block_ns`: with everything around it, down to the plan), token_us, hit_rate, preemptions, steps,
bytes_per_block, and one for each primitive of the pool, in ns. All times are CPU time of the one thread that works.

The JSON of `bench control --gap --json`: schema, command, started_at, machine as above, and
  gaps  label -> n (rows), step_s (what the simulated model takes; null: a real one), pipeline_depth (most steps in
        flight), device (whether a device computes beside the worker), steps (measured ones), and of these steps, each
        {p50, p90, p99, max}:
        gap_us (from the end of a step to when the worker takes up the next plan; of a device, to when it can begin with
        the next), work_us (what the worker, or the device, spends on a step), scheduler_us (what the scheduler spends
        on it: result, plan, encoding);
        gap_share: all gaps / (all gaps + all work)
Those are times of the clock on the wall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

Answers = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


def metrics(answer: Mapping[str, Any]) -> dict[str, float]:
    """One round of one case as numbers."""
    found: dict[str, float] = {}
    if "step_s" in answer:
        found["step_us"] = 1e6 * median(answer["step_s"])
        found["step_p90_us"] = 1e6 * float(np.quantile(answer["step_s"], 0.9))
        found["plan_bytes"] = answer["plan_bytes"]
        found["encode_decode_us"] = 1e6 * (answer["encode_s"] + answer["decode_s"])
    if "admit_s" in answer:
        found["block_ns"] = 1e9 * median(answer["admit_s"]) / answer["blocks"]
    if "engine_s" in answer:
        found["engine_block_ns"] = 1e9 * median(answer["engine_s"]) / answer["blocks"]
    if "per_token_s" in answer:
        found["token_us"] = 1e6 * answer["per_token_s"]
        found |= {name: answer[name] for name in ("hit_rate", "preemptions", "steps")}
    for name, seconds in answer.get("operations_s", {}).items():
        found[f"{name}, ns"] = 1e9 * seconds
    if "bytes_per_block" in answer:
        found["bytes_per_block"] = answer["bytes_per_block"]
    return found


def summarise(answers: Answers, sides: Sequence[str]) -> dict[str, dict[str, dict[str, dict[str, float | None]]]]:
    """cases[label][metric][side or "ratio"]. The ratio of a round sets two neighbours in time side by side."""
    cases = {}
    for label, by_side in answers.items():
        rounds = {side: [metrics(answer) for answer in by_side[side]] for side in sides}
        cases[label] = {
            metric: _row([[each.get(metric) for each in rounds[side]] for side in sides], sides)
            for metric in rounds[sides[0]][0]
        }
    return cases


def _row(values: list[list[float | None]], sides: Sequence[str]) -> dict[str, dict[str, float | None]]:
    row: dict[str, dict[str, float | None]] = {}
    for side, of_rounds in zip(sides, values, strict=True):
        known = [value for value in of_rounds if value is not None]
        if known:
            row[side] = {"median": median(known), "min": min(known), "max": max(known)}
    if len(row) == 2:
        ours, theirs = values
        ratios = [a / b for a, b in zip(ours, theirs, strict=True) if a is not None and b]
        if ratios:
            row["ratio"] = {"ratio": median(ratios), "min": min(ratios), "max": max(ratios)}
    return row


def slopes(answers: Answers, cases: Mapping[str, Mapping[str, Any]], side: str) -> dict[str, float] | None:
    """How a decode step of one cache group grows: with the batch, and with the blocks handed out in it.

    cases: arguments of the decode cases by label. None with fewer than two sizes of batch. Fitted to medians of equal
    (rows, blocks), each weighted alike, so that a few slow steps don't count.
    """
    points: dict[tuple[int, int], list[float]] = {}
    for label, arguments in cases.items():
        if label in answers and arguments.get("groups", 1) == 1:
            for answer in answers[label][side]:
                for seconds, blocks in zip(answer["step_s"], answer["blocks"], strict=True):
                    points.setdefault((arguments["n"], blocks), []).append(1e6 * seconds)
    if len({n for n, _ in points}) < 2:
        return None
    rows, blocks = np.array([n for n, _ in points]), np.array([b for _, b in points])
    times = np.array([median(each) for each in points.values()])
    base, per_row, per_block = np.linalg.lstsq(
        np.stack([np.ones_like(times), rows, blocks], axis=1), times, rcond=None
    )[0].tolist()
    return {"base_us": base, "per_row_us": per_row, "per_block_us": per_block}
