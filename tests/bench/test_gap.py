"""`bench control --gap`: its sums against numbers made by hand, and a deployment with a simulated worker."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.__main__ import main
from bench.control.gap import GapCase, gap_numbers, measure_gap
from protocol.messages import STEP_COLUMNS


def record(**columns: int) -> list[int]:
    return [columns.get(name, 0) for name in STEP_COLUMNS]


def test_the_gap_is_counted_where_all_rows_decode() -> None:
    decode = {"rows": 4, "tokens": 4, "apply_us": 100, "commit_us": 50, "forward_us": 700, "sample_us": 50}
    records = [record(**decode, idle_us=100, schedule_us=7, result_us=5, encode_us=1) for _ in range(3)]
    records += [record(**decode | {"tokens": 40}, idle_us=9999), record(**decode | {"rows": 3, "tokens": 3})]
    found = gap_numbers(np.array(records, dtype=np.int32), 4)
    assert found["steps"] == 3
    assert found["gap_us"] == {"p50": 100, "p90": 100, "p99": 100, "max": 100}
    assert found["work_us"]["p50"] == 900 and found["scheduler_us"]["p50"] == 13
    assert found["gap_share"] == pytest.approx(0.1)
    beside = gap_numbers(np.array(records, dtype=np.int32), 4, device=True)
    assert beside["work_us"]["p50"] == 750, "a device does not wait for what the host does meanwhile"


def test_a_real_scheduler_and_a_simulated_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = GapCase("few", 4, 300, 0.0005)
    monkeypatch.setattr("bench.control.command.gap_cases", lambda quick: [case])
    assert main(["control", "--gap", "--json", str(tmp_path / "gap.json")]) == 0
    result = json.loads((tmp_path / "gap.json").read_text())
    found = result["gaps"]["few"]
    assert (result["schema"], found["n"], found["pipeline_depth"]) == (1, 4, 2)
    assert 300 <= found["steps"] <= 2 * 300, "steps are counted once, although they were fetched in several looks"
    assert found["work_us"]["p50"] >= 500 and 0 < found["gap_share"] < 1
    assert "few" in capsys.readouterr().out


def test_a_device_goes_from_step_to_step_without_a_gap() -> None:
    """Its steps are long against what the host does in between, also on a busy machine."""
    found = measure_gap(GapCase("few", 4, 20, 0.02, device=True), lambda text: None)
    assert found["device"] and 19_999 <= found["work_us"]["p50"] < 20_500
    assert found["gap_us"]["p50"] == 0


def test_a_deployment_that_does_not_start_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.control.gap.TINY_MODEL", {"architectures": ["LlamaForCausalLM"]})
    monkeypatch.setattr("bench.control.command.gap_cases", lambda quick: [GapCase("none", 4, 8, 0.001)])
    assert main(["control", "--gap"]) == 1
    assert "ended with code 1" in capsys.readouterr().out
