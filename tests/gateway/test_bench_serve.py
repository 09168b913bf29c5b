"""`bench serve` against a real deployment, by HTTP and the client protocol: all kinds of load, and what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.stats import METRICS
from tests.integration.deployment import ROOT, Deployment

TOKENS = ("--token-ids", "10:200")
LOADS = {
    "random": ["--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--prefix-len", "16"],
    "poisson": ["--request-rate", "100", "--num-prompts", "4", "--input-len", "8", "--output-len", "4"],
    "multi-turn": ["--workload", "multi-turn", "--num-prompts", "2", "--turns", "3", "--turn-len", "4",
                   "--input-len", "40", "--output-len", "8"],
    "trace": ["--workload", "trace", "--trace-scale", "10", "--trace-block-size", "16"],
    "long-arrivals": ["--workload", "long-arrivals", "--num-prompts", "2", "--long-input-len", "256",
                      "--long-output-len", "2", "--input-len", "8", "--output-len", "64", "--concurrency", "4"],
}  # fmt: skip
TRACE = """\
{"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}
{"timestamp": 400, "input_length": 30, "output_length": 2, "hash_ids": [1, 3]}
{"timestamp": 900, "input_length": 5, "output_length": 4, "hash_ids": [4]}
"""


@pytest.fixture
def measure(server: Deployment, url: str, tmp_path: Path):
    """The written result of one kind of load, on the deployment seen as two servers."""
    (tmp_path / "trace.jsonl").write_text(TRACE)

    def run(kind: str) -> dict[str, Any]:
        flags = [*LOADS[kind], *(["--trace", str(tmp_path / "trace.jsonl")] if kind == "trace" else [])]
        flags += ["--target", f"pageplane={server.endpoints['client']}", "--target", f"openai={url},name=http"]
        flags += ["--json", str(tmp_path / f"{kind}.json"), "--plot", str(tmp_path / f"{kind}.svg")]
        code = main(["serve", *flags, *TOKENS, "--slo", "ttft:60000", "--repeat", "1", "--no-warmup"])
        result: dict[str, Any] = json.loads((tmp_path / f"{kind}.json").read_text())
        assert code == 0, [target["runs"] for target in result["targets"]]
        assert "http" in (tmp_path / f"{kind}.svg").read_text()
        return result

    return run


def test_every_kind_of_load_is_served_both_ways_and_writes_the_documented_keys(measure) -> None:
    results = {kind: measure(kind) for kind in LOADS}
    asked = {"random": (4, 16), "poisson": (4, 16), "multi-turn": (6, 48), "trace": (3, 9), "long-arrivals": (2, 4)}
    for kind, result in results.items():
        assert [target["name"] for target in result["targets"]] == ["pageplane", "http"]
        for target in result["targets"]:
            (run,) = target["runs"]
            assert (run["completed"], run["output_tokens"], run["failed"]) == (*asked[kind], 0), kind
            assert run["goodput_share"] == 1.0
            assert (run["background_itl_max_over_p50"] is not None) == (kind == "long-arrivals")
            assert (run["ttft_later_turns_p50_s"] is not None) == (kind == "multi-turn")
    written = set().union(*(paths(result, "") for result in results.values()))
    assert written == documented()


def documented() -> set[str]:
    """The keys of the table in docs/benchmarks.md."""
    section = (ROOT / "docs" / "benchmarks.md").read_text().split("## Keys of `--json`")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.M)
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)} - {"slo"}


def paths(value: Any, path: str) -> set[str]:
    """The leaves of a JSON document, its metrics as one."""
    if isinstance(value, dict) and path != "targets[].runs[].errors":
        if path.endswith(("summary", "metrics")):
            assert set(value) == set(METRICS)
            return set().union(*(paths(item, f"{path}.METRIC") for item in value.values()))
        return set().union(*(paths(item, f"{path}.{key}" if path else key) for key, item in value.items()))
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return set().union(*(paths(item, f"{path}[]") for item in value))
    return {path}
