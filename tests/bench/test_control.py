"""`bench control`: its sums against numbers made by hand, and its own side as a real process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.control.conductor import Case, Side, SideFailed, measure, our_command
from bench.control.driver import Driver, random_tokens
from bench.control.summary import slopes, summarise


def answer(step_us: float, blocks: int, plan_bytes: int = 100) -> dict:
    return {
        "step_s": [step_us * 1e-6] * 5,
        "blocks": [blocks] * 5,
        "plan_bytes": plan_bytes,
        "encode_s": 1e-6,
        "decode_s": 2e-6,
    }


def test_ratios_are_those_of_neighbouring_rounds() -> None:
    answers = {"d": {"a": [answer(10, 1), answer(30, 1)], "b": [answer(100, 1), answer(200, 1)]}}
    row = summarise(answers, ["a", "b"])["d"]["step_us"]
    assert row["a"] == pytest.approx({"median": 20, "min": 10, "max": 30})
    assert row["ratio"] == pytest.approx({"ratio": 0.125, "min": 0.1, "max": 0.15})


def test_a_metric_of_one_side_has_no_ratio() -> None:
    ours, theirs = {"admit_s": [64e-6], "engine_s": [128e-6], "blocks": 64}, {"admit_s": [128e-6], "blocks": 64}
    rows = summarise({"x": {"a": [ours], "b": [theirs]}}, ["a", "b"])["x"]
    assert rows["block_ns"]["ratio"]["ratio"] == pytest.approx(0.5)
    assert set(rows["engine_block_ns"]) == {"a"}


def test_slopes_are_found_again() -> None:
    cases = {f"{n}": {"n": n} for n in (64, 1024)} | {"two": {"n": 64, "groups": 2}}
    answers = {
        label: {"a": [answer(50 + 0.25 * arguments["n"] + 3 * b, b) for b in (0, arguments["n"] // 16)]}
        for label, arguments in cases.items()
    }
    found = slopes(answers, cases, "a")
    assert found is not None
    assert found == pytest.approx({"base_us": 50, "per_row_us": 0.25, "per_block_us": 3})
    assert slopes(answers, {"64": {"n": 64}}, "a") is None


def test_the_driver_decodes_with_the_real_engine() -> None:
    import random

    driver = Driver(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=64)
    driver.submit_all([random_tokens(random.Random(1), 20)] * 4, 8)
    while driver.busy:
        driver.step()
    assert driver.num_tokens == 4 * 8 and [f.reason for f in driver.finished] == ["length"] * 4
    assert driver.replica.manager.pool.num_free == 63


def test_our_side_answers_as_a_process() -> None:
    cases = [
        Case("decode", "decode", {"n": 4, "steps": 16}),
        Case("decode, 2 groups", "decode", {"n": 4, "steps": 16, "groups": 2}),
        Case("hits", "admission", {"length": 64, "hit": True, "count": 2}),
        Case("none", "admission", {"length": 64, "hit": False, "count": 2}),
        Case(
            "shared",
            "shared_prefix",
            {"requests": 8, "prefixes": 2, "prefix_len": 64, "unique_len": 4, "output_len": 4, "blocks": 64},
        ),
        Case("pool", "pool", {"blocks": 1000, "count": 64}),
    ]
    seen: list[str] = []
    with Side(our_command()) as side:
        answers = measure([side], cases, 2, seen.append)
        with pytest.raises(SideFailed, match="failed at decode"):
            side.run(Case("decode", "decode", {"n": "many", "steps": 1}))
        assert side.run(cases[0])["plan_bytes"] > 0, "one failed case does not end it"
    assert len(seen) == 2 * len(cases)
    decoded = answers["decode"]["pageplane"]
    assert all(sum(each["blocks"]) == 4 for each in decoded), "16 tokens each: each of the four opens one block"
    rows = summarise(answers, ["pageplane"])
    assert rows["shared"]["hit_rate"]["pageplane"]["median"] == pytest.approx((8 - 2) * 64 / (8 * 68))
    assert rows["pool"]["bytes_per_block"]["pageplane"]["median"] < 200


def test_a_side_that_cannot_run_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SideFailed, match="/nowhere/python"), Side(["/nowhere/python"]):
        pass
    with pytest.raises(SideFailed, match="exit code 3"), Side([our_command()[0], "-c", "raise SystemExit(3)"]):
        pass
    assert main(["control", "--vllm-python", "python"]) == 2
    assert "--model" in capsys.readouterr().out
    assert main(["control", "--rounds", "0"]) == 2


def test_json_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Case(f"decode, {n}", "decode", {"n": n, "steps": 16}) for n in (2, 4)]
    monkeypatch.setattr("bench.control.command.cases", lambda quick: few)
    assert (
        main(["control", "--rounds", "1", "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]) == 0
    )
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["schema"] == 1 and result["sides"] == ["pageplane"] and set(result["slopes"]) == {"pageplane"}
    assert set(result["cases"]["decode, 4"]["step_us"]) == {"pageplane"}
    assert (tmp_path / "r.png").stat().st_size > 1000
