"""Cases of all kinds, tiny, really measured on the CPU: what comes out is complete, right, and says what it is."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.__main__ import main
from bench.kernels import attention, results, session
from bench.kernels.budget import Budget
from bench.kernels.cases import (
    AttentionCase,
    Case,
    CopyBlocksCase,
    DecodeStepCase,
    ElementwiseCase,
    GemmCase,
    SlotMappingCase,
    Target,
    WriteKVCase,
    chunk_among_decodes,
    decode,
)
from bench.kernels.decode_step import SteadyDecode, measure_decode_step
from bench.kernels.device import INT8, LINEAR, CannotMeasure
from bench.kernels.on_cpu import CpuBench, last_level_cache_bytes
from bench.kernels.results import KernelsResult, Measured, runs_of
from bench.kernels.session import measure_all, measure_one
from bench.kernels.table import print_result
from bench.kernels.timing import Timing
from bench.kernels.work import Ceilings, Heads, ModelShape
from worker.batch import InputBatch

HEADS = Heads(4, 2, 16)
TINY = ModelShape("tiny", 2, 64, 96, HEADS, 259, tied=False)
MIXED = AttentionCase("mixed", HEADS, *chunk_among_decodes(5, 6, 3, 9), 4, "float32", "float32")
CASES: list[Case] = [
    MIXED,
    AttentionCase("prefill", HEADS, (7,), (7,), 4, "float32", "float32"),
    AttentionCase("window", HEADS, *decode(3, 20), 4, "float32", "float32", window=6),
    AttentionCase("window of a prefill", HEADS, (9,), (9,), 4, "float32", "float32", window=3),
    WriteKVCase("write", HEADS, 5, 4, "float32", "float32"),
    CopyBlocksCase("copy", HEADS, 2, 3, 4, "float32"),
    GemmCase("product", 3, 32, 48, target=Target(2, 1)),
    ElementwiseCase("norm", "add_norm", TINY, 5),
    ElementwiseCase("gate", "silu_and_mul", TINY, 5),
    DecodeStepCase("step", TINY, 3, 40, 8, "float32", "float32"),
    DecodeStepCase("step, fp8 cache", TINY, 3, 40, 8, "float32", "fp8_e4m3"),
]


class FewSets(CpuBench):
    """Two sets of inputs are enough here."""

    backends = ("torch",)

    def num_sets(self, set_bytes: int) -> tuple[int, bool]:
        return 2, False

    def measure_ceilings(self) -> Ceilings:
        return Ceilings(1e9, {"float32": 1e11, "bfloat16": 1e12})


@pytest.fixture(scope="module")
def bench():
    before = torch.get_num_threads()
    few = FewSets(1)
    few.backends = ("torch",)
    yield few
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def result(bench: CpuBench) -> KernelsResult:
    """All cases, measured as the command does it."""
    ceilings = Ceilings(1e10, {"float32": 1e11, "bfloat16": 1e11})
    whole = KernelsResult("python -m bench kernels", "2026-01-01T00:00:00+00:00", {}, bench.describe(), ceilings)
    clock = iter(range(10**6))
    budget = Budget(10**6, lambda: float(next(clock)), {})
    measure_all(CASES, bench, budget, whole, 0.01, Console(quiet=True), lambda: None)
    return whole


def test_every_kind_is_measured_and_right(result: KernelsResult):
    assert not result.skipped
    assert [one.case.name for one in result.measured] == [*(case.name for case in CASES), "product"]
    assert [one.backend for one in result.measured if one.case.name == "product"] == [LINEAR, INT8]
    for one in result.measured:
        assert 0 < one.timing.min_us <= one.timing.median_us <= one.timing.max_us
        assert not one.wrong
        if one.baseline is not None:
            assert one.relative_error is not None
    assert [one.case.name for one in result.measured if one.relative_error is None] == [
        "window of a prefill", "write", "copy", "step", "step, fp8 cache",
    ]  # fmt: skip
    assert result.drift is not None
    assert result.ceilings == Ceilings(1e10, {"float32": 1e11, "bfloat16": 1e12}), "the better of both"


def test_a_decode_step_tells_its_parts(result: KernelsResult):
    step = next(one for one in result.measured if one.case.kind == "decode_step")
    parts = step.parts_us
    assert parts is not None
    assert parts["forward"] > 0
    assert sum(parts.values()) <= 1.5 * step.timing.max_us


def test_the_keys_of_the_json_are_those_documented(result: KernelsResult, tmp_path: Path):
    result.write(tmp_path / "k.json")
    read = json.loads((tmp_path / "k.json").read_text())
    assert set(read) == {
        "schema", "command", "started_at", "machine", "device", "ceilings", "cases", "skipped", "cannot", "drift",
    }  # fmt: skip
    assert {tuple(case) for case in read["cases"]} == {
        (
            "name", "kind", "backend", "shape", "bytes", "flops", "floor_us", "bound_by", "timing", "share_of_floor",
            "baseline", "relative_error", "target_us", "parts_us",
        )
    }  # fmt: skip
    first = read["cases"][0]
    assert first["shape"]["query_lens"] == [[5, 1], [1, 3]]
    assert first["shape"]["heads"] == {"num_q": 4, "num_kv": 2, "head_dim": 16}
    assert first["floor_us"] == pytest.approx(MIXED.work.bytes / 1e10 * 1e6)
    assert first["bound_by"] == "memory"
    assert first["share_of_floor"] == pytest.approx(first["floor_us"] / first["timing"]["median_us"])
    assert first["baseline"]["name"] == attention.BASELINE
    assert read["cases"][6]["target_us"] == {"first_us": 2, "good_us": 1}
    assert not [name for name in (*read, *first) if name not in (results.__doc__ or "")]


def test_the_table_names_floor_target_baseline_and_what_was_left_out(bench: CpuBench, result: KernelsResult):
    shown = KernelsResult("", "", {}, bench.describe(), result.ceilings, list(result.measured), drift=1.25)
    shown.measured.append(replace(result.measured[0], relative_error=float("nan")))
    clock = iter([0.0, *[10.0] * 100])
    measure_all(CASES[:2], bench, Budget(1, lambda: next(clock), {}), shown, 0.01, Console(quiet=True), lambda: None)
    console = Console(record=True, width=200, file=io.StringIO())
    print_result(shown, console)
    text = console.export_text()
    assert "nan WRONG" in text
    assert "2.00 / 1.00" in text
    assert "1.25 of its first time" in text
    assert "left out, no time left: mixed (torch), prefill (torch)" in text
    assert "step: apply" in text


@pytest.mark.parametrize(
    "case", [case for case in CASES if isinstance(case, AttentionCase)], ids=lambda case: case.name
)
def test_the_dense_baseline_computes_the_same(bench: CpuBench, case: AttentionCase):
    """The numba kernels, too, through tables of scattered blocks."""
    measured = measure_one(case, "cpu", bench, 0.001)
    if attention.has_dense_form(case):
        assert measured.relative_error is not None
        assert measured.relative_error < 1e-5


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_a_quantised_cache_is_held_against_the_numbers_it_stands_for(bench: CpuBench, kv_dtype: str):
    measured = measure_one(replace(MIXED, kv_dtype=kv_dtype), "torch", bench, 0.001)
    assert measured.relative_error is not None
    assert measured.relative_error < 1e-5
    write = WriteKVCase("write", HEADS, 5, 4, kv_dtype=kv_dtype)
    assert measure_one(write, "torch", bench, 0.001).timing.median_us > 0


def test_a_wrong_result_is_called_so(bench: CpuBench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "dense_of", lambda cache, table, first, end: torch.randn(
        table.shape[0], cache.shape[1], end - first, cache.shape[3]
    ))  # fmt: skip
    assert measure_one(MIXED, "torch", bench, 0.001).wrong


def test_what_a_backend_lacks_is_left_out_with_the_reason(bench: CpuBench):
    with pytest.raises(CannotMeasure, match="has no float8_e4m3fn cache"):
        measure_one(replace(MIXED, kv_dtype="fp8_e4m3"), "cpu", bench, 0.001)
    with pytest.raises(CannotMeasure, match="splits no key ranges"):
        measure_one(replace(MIXED, split_size=64), "torch", bench, 0.001)
    for case in (SlotMappingCase("slots", (1,), (9,), 4), ElementwiseCase("turn", "rotate_and_write_kv", TINY, 2)):
        with pytest.raises(CannotMeasure, match=r"on a CPU|on a GPU only"):
            measure_one(case, "torch", bench, 0.001)
    with pytest.raises(CannotMeasure, match="runs on cuda"):
        measure_one(MIXED, "triton", bench, 0.001)


def test_a_kernel_that_breaks_does_not_hide_the_others(bench: CpuBench, monkeypatch: pytest.MonkeyPatch):
    def broken(case: Case, *rest: object) -> Measured:
        if case is CASES[0]:
            raise RuntimeError("illegal memory access")
        return Measured(case, "torch", Timing.of([1.0], calls_per_sample=1, timed_by="clock", cold=False))

    monkeypatch.setattr(session, "measure_one", broken)
    result = KernelsResult("", "", {}, {}, Ceilings(1.0, {}))
    clock = iter(range(1000))
    measure_all(
        CASES[:2], bench, Budget(1e6, lambda: float(next(clock)), {}), result, 0.01, Console(quiet=True), lambda: None
    )
    assert [(one.reason, one.failed) for one in result.skipped] == [("RuntimeError: illegal memory access", True)]
    assert [one.case.name for one in result.measured] == ["prefill"]
    assert result.measured[0].share_of_floor(Ceilings(1.0, {})) is None


def test_plans_of_a_steady_decode_are_accepted_and_advance_every_row():
    steady = SteadyDecode(3, 40, 8, 12)
    batch = InputBatch(3, 64, (0,), 8)
    for step in range(12):
        inputs = batch.apply(steady.next_plan())
        assert inputs.seq_lens.tolist() == [40 + step] * 3
        assert inputs.sampling.tolist() == [0, 1, 2]
        batch.append_sampled(inputs.rows, inputs.rows.astype("int32"))


def test_the_measured_steps_lie_about_the_length_of_the_case(bench: CpuBench, monkeypatch: pytest.MonkeyPatch):
    made: list[SteadyDecode] = []

    class Watched(SteadyDecode):
        def __init__(self, *args: int) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("bench.kernels.decode_step.SteadyDecode", Watched)
    case = CASES[-1]
    assert isinstance(case, DecodeStepCase)
    measure_decode_step(case, "torch", bench, 60.0)
    assert made[0].seq_len < case.seq_len < made[0].seq_len + made[0].steps


def test_runs_are_counted():
    assert runs_of((5, 1, 1, 1, 5)) == [[5, 1], [1, 3], [5, 1]]
    assert runs_of(()) == []


def test_the_last_level_cache_is_read(tmp_path: Path):
    for index, size in enumerate(["48K", "2048K", "36M"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_cache_bytes(tmp_path) == 36 * 2**20
    assert last_level_cache_bytes(tmp_path / "nowhere") > 0


def test_the_command_lists_its_cases_and_refuses_what_can_not_work(capsys: pytest.CaptureFixture[str]):
    assert main(["kernels", "--list", "--device", "cpu", "--only", "decode_step"]) == 0
    assert "decode step 16 x 512" in capsys.readouterr().out
    assert main(["kernels", "--only", "nonsense"]) == 2
    assert "'nonsense'" in capsys.readouterr().err
    assert main(["kernels", "--tiles", "--device", "cpu"]) == 2
    assert "no tiles to choose" in capsys.readouterr().err
    assert main(["kernels", "--minutes", "0"]) == 2
    assert "--minutes" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_what_it_can_not_show(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["kernels", "--device", "cuda"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(CpuBench, "measure_ceilings", lambda self: Ceilings(1e10, {"bfloat16": 1e11}))
    plot, numbers = tmp_path / "k.png", tmp_path / "k.json"
    command = ["kernels", "--quick", "--threads", "1", "--only", "write_kv 16"]
    assert main([*command, "--json", str(numbers), "--plot", str(plot)]) == 0
    shown = capsys.readouterr()
    assert "nothing is said of the Triton kernels' speed" in " ".join(shown.err.split())
    assert "write_kv 16 tokens" in shown.out
    assert json.loads(numbers.read_text())["cannot"]
    assert plot.stat().st_size > 1000
