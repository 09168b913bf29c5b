"""Bytes, operations and floors, against calculations by hand; and the order in which time is spent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.kernels.budget import Budget
from bench.kernels.cases import (
    EXPECTED_S,
    LLAMA_8B,
    AttentionCase,
    Case,
    Target,
    chunk_among_decodes,
    cpu_cases,
    cuda_cases,
    decode,
    tile_cases,
)
from bench.kernels.timing import Timing
from bench.kernels.work import (
    Ceilings,
    Heads,
    ModelShape,
    attention_work,
    copy_blocks_work,
    decode_step_work,
    elementwise_work,
    gemm_work,
    slot_mapping_work,
    visible_keys,
    visible_pairs,
    write_kv_work,
)

ROOT = Path(__file__).parents[2]
H200 = Ceilings(4.3e12, {"bfloat16": 790e12})


def case_of(name: str, cases: list[Case]) -> AttentionCase:
    case = next(case for case in cases if case.name == name)
    assert isinstance(case, AttentionCase)
    return case


@pytest.mark.parametrize("query_len", range(1, 8))
@pytest.mark.parametrize("context", range(5))
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 20])
def test_pairs_and_keys_are_those_that_a_loop_counts(query_len: int, context: int, window: int | None):
    seen = [range(0 if window is None else max(0, p - window + 1), p + 1) for p in range(context, context + query_len)]
    assert visible_pairs(query_len, context + query_len, window) == sum(len(keys) for keys in seen)
    assert visible_keys(query_len, context + query_len, window) == len({key for keys in seen for key in keys})


@pytest.mark.parametrize(
    ("lens", "kv_dtype", "floor_us"),
    [
        (decode(64, 4096), "bfloat16", 250),
        (decode(64, 4096), "fp8_e4m3", 125),
        (decode(1, 131072), "bfloat16", 125),
        (decode(256, 1024), "bfloat16", 251),
        (((8192,), (8192,)), "bfloat16", 696),
        (chunk_among_decodes(2048, 0, 63, 4096), "bfloat16", 256),
        (chunk_among_decodes(2048, 6144, 63, 4096), "bfloat16", 310),
    ],
)
def test_the_floors_of_llama_3_8b_on_an_h200(lens: tuple, kv_dtype: str, floor_us: float):
    """Worked out by hand from 4.3 TB/s and 790 TFLOP/s; see docs/gpu.md."""
    work = attention_work(LLAMA_8B.heads, *lens, None, "bfloat16", kv_dtype)
    assert H200.floor_us(work) == pytest.approx(floor_us, rel=0.004)


def test_attention_moves_k_v_q_and_out_once():
    work = attention_work(Heads(4, 2, 16), [1, 3], [10, 3], None, "float32", "bfloat16")
    assert work.bytes == 2 * (10 + 3) * 2 * 16 * 2 + 2 * 4 * 4 * 16 * 4
    assert work.flops == 4 * 16 * 4 * (10 + 1 + 2 + 3)


def test_other_kernels_by_hand():
    assert gemm_work(2, 3, 5, "bfloat16").bytes == 2 * (15 + 6 + 10)
    assert gemm_work(2, 3, 5, "bfloat16").flops == 60
    assert write_kv_work(2048, Heads(32, 8, 128), "bfloat16", "bfloat16").bytes == 2 * 2048 * 1024 * 4 + 8 * 2048
    assert copy_blocks_work(3, 4, 16, Heads(8, 2, 32), "bfloat16").bytes == 2 * 3 * 4 * 16 * 2 * 32 * 2


def test_between_the_products_everything_moves_once():
    tiny = ModelShape("tiny", 1, 10, 30, Heads(4, 2, 8), 100, tied=False)
    assert elementwise_work("add_norm", tiny, 3, "bfloat16").bytes == 3 * 10 * (4 + 4 + 2 + 2) + 40
    assert elementwise_work("silu_and_mul", tiny, 3, "bfloat16").bytes == 3 * (60 + 30) * 2
    rotation = elementwise_work("rotate_and_write_kv", tiny, 3, "bfloat16")
    assert rotation.bytes == 3 * (2 * 2 * (4 + 2 + 2) * 8 + 4 * 8 + 8 + 8)
    assert slot_mapping_work(7, 2).bytes == 7 * (8 + 4) + 2 * 12
    with pytest.raises(ValueError, match="'nonsense'"):
        elementwise_work("nonsense", tiny, 3, "bfloat16")


def test_a_decode_step_of_8b_reads_its_weights_and_its_cache():
    """7.50 G weights that every token is multiplied with (8.03 G less the embedding), and 128 KiB of KV a token."""
    assert LLAMA_8B.num_products == pytest.approx(7.504e9, rel=1e-3)
    work = decode_step_work(LLAMA_8B, 64, 1024, "bfloat16", "bfloat16")
    assert work.bytes == pytest.approx(2 * LLAMA_8B.num_products + 64 * 1024 * 131072, rel=0.005)
    assert H200.floor_us(work) == pytest.approx(5488, rel=0.005)


def test_without_a_rate_for_its_dtype_there_is_no_floor():
    work = gemm_work(2, 3, 5, "float32")
    assert H200.floor_us(work) is None
    assert H200.memory_us(work) > 0
    assert H200.floor_us(write_kv_work(1, Heads(1, 1, 1), "float32", "float32")) is not None


def test_the_targets_come_first_and_none_is_below_its_floor():
    cases = cuda_cases()
    aimed = [case for case in cases if case.target is not None and "," not in case.name]
    assert aimed == cases[: len(aimed)]
    for case in cases:
        if isinstance(case.target, Target) and "blocks" not in case.name and "splits" not in case.name:
            floor_us = H200.floor_us(case.work)
            assert floor_us is not None
            assert floor_us < case.target.good_us < case.target.first_us


@pytest.mark.parametrize("cases", [cuda_cases(), cpu_cases()], ids=["cuda", "cpu"])
def test_names_are_unique_and_kinds_all_there(cases: list[Case]):
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    kinds = {"attention", "write_kv", "copy_blocks", "gemm", "decode_step", "elementwise"}
    assert {case.kind for case in cases} - {"slot_mapping"} == kinds
    assert kinds <= set(EXPECTED_S)


def test_the_table_of_the_documentation_is_what_the_code_says():
    """docs/gpu.md: MB, GFLOP, floor at the rates of an H200, targets."""
    rows = re.findall(r"^\| ((?:decode|prefill|chunk) .*?) \|(.*)\|$", (ROOT / "docs" / "gpu.md").read_text(), re.M)
    aimed = {case.name: case for case in cuda_cases() if case.target is not None}
    for name, cells in rows:
        case = aimed[name]
        assert case.target is not None
        work, floor_us = case.work, H200.floor_us(case.work)
        assert [cell.strip() for cell in cells.split("|")] == [
            f"{work.bytes / 1e6:.1f}", f"{work.flops / 1e9:.1f}", f"{floor_us:.0f}",
            f"{case.target.first_us:g}", f"{case.target.good_us:g}",
        ]  # fmt: skip
    assert {name for name, _ in rows} == {name for name in aimed if "blocks" not in name and "splits" not in name}


def test_tiles_are_tried_on_the_shapes_of_the_targets():
    cases = tile_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert [case for case in cases if isinstance(case, AttentionCase) and case.tiles and case.target] == cases
    assert {case.tiles.for_decode for case in cases if isinstance(case, AttentionCase) and case.tiles} == {True, False}


def test_the_split_targets_shapes_of_the_mix():
    mixed = case_of("chunk 2048 after 6144, 63 decodes x 4096", cuda_cases())
    assert (mixed.query_lens[:2], mixed.seq_lens[:2], len(mixed.seq_lens)) == ((2048, 1), (8192, 4096), 64)


def test_a_budget_begins_nothing_that_would_not_end():
    now = [0.0]
    budget = Budget(60, lambda: now[0], {"slow": 50.0})
    assert budget.allows("slow")
    assert not budget.allows("slow", reserve_s=11)
    assert budget.allows("unknown")
    budget.took("slow", 5)
    budget.took("slow", 3)
    assert budget.expected_s("slow") == 5
    now[0] = 54.0
    assert budget.allows("slow")
    assert not budget.allows("slow", reserve_s=2)
    now[0] = 61.0
    assert not budget.allows("unknown", reserve_s=0.1)


def test_a_timing_is_the_median_and_its_spread():
    timing = Timing.of([5.0, 1.0, 2.0, 4.0, 3.0], calls_per_sample=7, timed_by="clock", cold=False)
    assert (timing.median_us, timing.min_us, timing.max_us, timing.samples) == (3, 1, 5, 5)
    assert (timing.p25_us, timing.p75_us) == (2, 4)
    assert Timing.of([2.0], calls_per_sample=1, timed_by="clock", cold=False).p75_us == 2
    with pytest.raises(ValueError, match="no sample"):
        Timing.of([], calls_per_sample=1, timed_by="clock", cold=False)
