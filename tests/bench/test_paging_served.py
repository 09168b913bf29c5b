"""`bench paging memory` and `blocks`: what is made of step records by hand, and one small run of real servers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.__main__ import main
from bench.paging import blocks, memory, served_command
from bench.paging.blocks import BlockSettings
from bench.paging.load import short_chat
from bench.paging.memory import MemorySettings
from bench.paging.models import MODELS
from bench.paging.observed import Kernel, PoolSample, summarise
from protocol.messages import STEP_COLUMNS, KernelShare, Profile


def steps(*records: dict[str, int]) -> np.ndarray:
    return np.array([[record.get(name, 0) for name in STEP_COLUMNS] for record in records], dtype=np.int32)


def test_steps_and_looks_become_numbers() -> None:
    seen = summarise(
        steps(
            {"rows": 1, "tokens": 200, "forward_us": 9000, "sample_us": 100, "plan_bytes": 900, "schedule_us": 50},
            {"rows": 2, "tokens": 2, "apply_us": 10, "forward_us": 2000, "plan_bytes": 40, "encode_us": 20},
            {"rows": 2, "tokens": 2, "forward_us": 4000, "commit_us": 20, "plan_bytes": 56, "result_us": 30},
            {"rows": 1, "tokens": 1, "forward_us": 1500, "plan_bytes": 48},
            {"rows": 0, "tokens": 64, "forward_us": 999},
        ),
        [PoolSample(0, 0, 8, 8), PoolSample(2, 30, 6, 8), PoolSample(1, 10, 7, 8)],
        block_size=16, preemptions=3, queries=100, hits=40,
    )  # fmt: skip
    assert (seen.steps, seen.decode_steps, seen.rows, seen.preemptions) == (5, 3, 1.2, 3)
    assert (seen.running, seen.effective_slots, seen.allocated_slots, seen.free_blocks) == (1.5, 20, 24, 6.5)
    assert (seen.decode_step_ms, seen.one_row_step_ms) == (2.01, 1.5)
    assert (seen.prefill_us_per_token, seen.decode_plan_bytes, seen.scheduler_step_us) == (45, 48, 20)
    assert seen.hit_rate == 0.4


def test_nothing_seen_is_none_and_not_zero() -> None:
    seen = summarise(steps({"rows": 1, "tokens": 9}), [], 16, preemptions=0, queries=0, hits=0)
    assert seen.hit_rate is seen.running is seen.decode_step_ms is seen.prefill_us_per_token is None


def test_attention_is_found_in_a_profile() -> None:
    kernels = (KernelShare("cpu::paged_attention", 60, 400), KernelShare("aten::mm", 60, 500))
    assert Kernel.of(Profile(2, 1000, "cpu", kernels)) == Kernel(2, 200, 0.4)
    assert Kernel.of(Profile(2, 1000, "cpu", kernels[1:])) is None
    assert Kernel.of(Profile(0, 0, "cpu", ())) is None


def test_prompts_have_the_lengths_of_the_load_behind_shared_prefixes() -> None:
    load = short_chat(9, 1)
    requests, others = (memory.requests_of(load, 20, (100, 4000), turn) for turn in (1, 2))
    assert [(len(r.prompt_token_ids), r.output_len) for r in requests] == [
        (20 + item.prompt_len, item.output_len) for item in load.items
    ]
    heads = [request.prompt_token_ids[:20] for request in requests]
    assert heads[0] == heads[4] == heads[8] and len(set(heads)) == 4
    assert heads[0] != others[0].prompt_token_ids[:20], "a prefix cache finds nothing of an earlier round"


def test_balance_and_spread() -> None:
    rows = [{"runs": [{"one_row_step_ms": 20.0, "prefill_us_per_token": 800.0}]}]
    assert memory.balance_of(rows) == 25
    assert memory.balance_of([{"runs": [{"one_row_step_ms": None, "prefill_us_per_token": 800.0}]}]) is None
    assert memory.spread([None, 3.0, 1.0, 2.0]) == memory.Spread(2.0, 1.0, 3.0)
    assert memory.spread([None]) == memory.Spread(None, None, None)


def test_closed_forms_of_block_sizes() -> None:
    assert blocks.closed_forms(16) == {"tail_waste": 7.5, "hit_rate": 12 / 16 * 192 / 220, "plan_bytes": 48}
    runs = [{"allocated_slots": 96.0, "effective_slots": 80.0, "running": 2.0}] * 2
    assert blocks.tail_waste(runs) == 8


def test_bytes_of_a_slot_and_of_the_weights() -> None:
    smollm2 = MODELS["smollm2"]
    assert smollm2.slot_bytes == 23_040
    assert smollm2.weight_bytes == pytest.approx(269_000_000, rel=0.001)


def test_real_servers_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = MemorySettings(memories=(1,), requests=16, rounds=1, alone_requests=1, kinds=("reserved", "paged"))
    monkeypatch.setattr(served_command, "QUICK_MEMORY", few)
    monkeypatch.setattr(served_command, "QUICK_BLOCKS", BlockSettings((32,), rounds=1, prefill_requests=3))
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    flags = ["--quick", "--json", str(out), "--plot", str(picture), "--add"]
    assert main(["paging", "memory", *flags]) == 0
    assert main(["paging", "blocks", *flags]) == 0
    by_memory, by_size = json.loads(out.read_text())["parts"]
    assert (by_memory["load_name"], by_memory["model"]["dtype"]) == ("shared", "bfloat16")
    assert [(row["kind"], row["at_once"], row["max_num_seqs"]) for row in by_memory["rows"]] == [
        ("reserved", 64, 2), ("paged", 64, 64), ("reserved", 1, 2), ("paged", 1, 64),
    ]  # fmt: skip
    reserved, paged, *_ = (row["runs"][0] for row in by_memory["rows"])
    asked = sum(item.output_len for item in short_chat(few.requests, few.seed).items)
    assert reserved["output_tokens"] == paged["output_tokens"] == asked
    assert paged["rows"] > reserved["rows"] and paged["steps"] < reserved["steps"]
    assert paged["effective_slots"] <= paged["allocated_slots"] <= 1024
    (row,) = by_size["rows"]
    assert row["hits"]["runs"][0]["hit_rate"] == pytest.approx(row["closed_forms"]["hit_rate"])
    assert row["decode"]["runs"][0]["decode_step_ms"] > 0 and row["prefill"]["runs"][0]["prefill_us_per_token"] > 0
    assert picture.stat().st_size > 1000


def test_what_can_not_work_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paging", "memory", "--add"]) == 2
    assert main(["paging", "blocks", "--rounds", "-1"]) == 2
    assert "--add needs --json" in capsys.readouterr().out
