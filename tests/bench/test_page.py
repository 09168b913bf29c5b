"""A marker in a page becomes the table of its file, and stays it when the file or the page around it changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.__main__ import main
from bench.load import ClosedLoop
from bench.long_arrivals import BesideStreams, LongArrivals
from bench.page import control_table, serve_table
from bench.page.command import render
from bench.page.markdown import command, number
from bench.page.markers import BEGIN, END, fill, named
from bench.record import Observed, RequestRecord
from bench.results import Result, TargetResult
from bench.slo import Slo
from bench.stats import RunStats, run_stats
from bench.workload import RandomWorkload

MACHINE: dict[str, str | int | None] = {"cpu": "a CPU", "cores": 2, "memory_gib": 24, "commit": "abc"}


def run_of(tokens: int) -> RunStats:
    return run_stats(Observed([RequestRecord(tokens, 0.0, [(0.5, 1), (1.0, tokens - 1)])]))


def result_of(*names: str, **options: Any) -> dict[str, Any]:
    """Each further target is twice as fast as the one before, 10 tokens/s the first; 3 rounds."""
    targets = [
        TargetResult(name, "openai", "http://x", 8.0 / 2**i, run_of(2), [run_of((10 + r) * 2**i) for r in range(3)])
        for i, name in enumerate(names)
    ]
    load = options.pop("load", ClosedLoop(RandomWorkload(), 16))
    return Result(
        "python -m bench serve --x 'a b'", "2026-01-02T03:04:05+00:00", MACHINE, load, targets, **options
    ).as_json()


def cells(text: str, label: str) -> list[str]:
    (line,) = (line for line in text.split("\n") if line.startswith(f"| {label} |".replace("  ", " ")))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_a_peer_comes_first_and_others_are_set_against_it():
    text = serve_table.render(result_of("int8", "vllm"), "f.json")
    assert cells(text, "") == ["vLLM, bfloat16", "Pageplane, int8", "÷ vLLM"]
    assert cells(text, "output tokens/s") == [
        "22.00 (20.00 … 24.00)",
        "11.00 (10.00 … 12.00)",
        "**0.50** (0.50 … 0.50)",
    ]
    assert cells(text, "TTFT p50, s") == ["0.500", "0.500", "1.00 (1.00 … 1.00)"]
    assert cells(text, "start to ready, s") == ["4.00", "8.00", "2.00"]
    assert cells(text, "failed") == ["0 of 3", "0 of 3", ""]
    assert text.startswith(
        "48 requests, 256 tokens in, 64 out, 16 at a time. 3 rounds, interleaved, after a discarded one"
    )
    assert "2026-01-02" in text and "(measurements/f.json)" in text and "--x 'a b'" in text


def test_up_to_four_targets_with_two_peers():
    text = serve_table.render(result_of("vllm", "llama", "bf16", "mine"), "f.json")
    assert cells(text, "") == [
        "vLLM, bfloat16", "llama.cpp, bfloat16",
        "Pageplane, bfloat16", "÷ vLLM", "÷ llama.cpp", "mine", "÷ vLLM", "÷ llama.cpp",
    ]  # fmt: skip
    ratios = [cell.split(" ")[0] for cell in cells(text, "output tokens/s") if cell.startswith("**")]
    assert ratios == ["**4.00**", "**2.00**", "**8.00**", "**4.00**"]
    assert {len(line.split("|")) for line in text.split("\n") if line.startswith("|")} == {11}


def test_a_baseline_is_the_first_target_or_whom_the_marker_names():
    assert cells(serve_table.render(result_of("a", "b", "c"), "f"), "") == ["a", "b", "÷ a", "c", "÷ a"]
    assert cells(serve_table.render(result_of("a", "vllm"), "f", baseline="a"), "") == ["a", "vLLM, bfloat16", "÷ a"]
    with pytest.raises(ValueError, match="'d' is no target; there are a, b"):
        serve_table.render(result_of("a", "b"), "f", baseline="d")


def test_rows_are_those_that_the_load_has():
    result = result_of("a", "b", slo=Slo(ttft_s=0.5))
    assert "meet the objectives" not in serve_table.render(result, "f")  # no run counted them
    for target in result["targets"]:
        target["runs"] = [{**run, "goodput_share": 0.5, "goodput_requests_per_s": 2.0} for run in target["runs"]]
    text = serve_table.render(result, "f")
    assert cells(text, "share that meets them, %") == ["50.0", "50.0", "1.00 (1.00 … 1.00)"]
    assert "Objectives: TTFT ≤ 500 ms." in text


def test_long_arrivals_show_what_the_streams_felt():
    result = result_of("a", load=BesideStreams(LongArrivals(), 8))
    result["targets"][0]["runs"][0]["background_itl_max_over_p50"] = 2.5
    text = serve_table.render(result, "f")
    assert cells(text, "streams meanwhile: greatest ITL ÷ median") == ["2.50"]
    assert "output tokens/s" not in text
    assert text.startswith("6 prompts of 2,048 tokens, one after another, beside 8 streams (64 in, 2,048 out).")


def test_a_file_of_an_earlier_version_is_shown_too():
    result = result_of("a", "b")
    del result["arrivals"], result["slo"], result["workload"]["kind"]
    for target in result["targets"]:
        for run in [target["warmup"], *target["runs"]]:
            for name in [
                name for name in run if name.startswith(("goodput", "background", "ttft_first", "ttft_later"))
            ]:
                del run[name]
    assert cells(serve_table.render(result, "f"), "output tokens/s")[2].startswith("**2.00**")


def test_the_control_plane_beside_its_peer():
    def row(ours: float, theirs: float) -> dict[str, Any]:
        ratio = ours / theirs
        return {
            "pageplane": {"median": ours},
            "vLLM 1": {"median": theirs},
            "ratio": {"ratio": ratio, "min": ratio, "max": ratio},
        }

    result = {
        "command": "python -m bench control", "started_at": "2026-01-02", "machine": MACHINE, "rounds": 3,
        "sides": ["pageplane", "vLLM 1"],
        "cases": {
            "decode, 64 running": {"step_us": row(200, 800)},
            "decode, 1,024 running": {"step_us": row(500, 15000), "plan_bytes": row(6, 10)},
            "shared prefixes, 512 requests": {"hit_rate": row(0.962, 0.962)},
            "block pool": {"bytes_per_block": {"pageplane": {"median": 129.4}}},
        },
        "slopes": {
            "pageplane": {"base_us": 100, "per_row_us": 0.2, "per_block_us": 2},
            "vLLM 1": {"base_us": -5, "per_row_us": 20, "per_block_us": -1},
        },
    }  # fmt: skip
    text = control_table.render(result, "f.json")
    assert cells(text, "step, 64 running, µs") == ["200", "800", "1/4.0 (1/4.0 … 1/4.0)"]
    assert cells(text, "step, 1,024 running, µs") == ["500", "15,000", "1/30 (1/30 … 1/30)"]
    assert cells(text, "plan, 1,024 running, bytes") == ["6.00", "10.0", "0.60 (0.60 … 0.60)"]
    assert cells(text, "their hit rate") == ["96.2%", "96.2%", ""]
    assert cells(text, "memory of a block's books, bytes") == ["129", "", ""]
    assert "step, 256" not in text
    growth = " ".join(text.split("What a step takes")[1].split("\n\n")[0].split())
    assert "Pageplane: 100 µs, and 0.200 µs for each running request, 2.00 µs for each block handed out." in growth
    assert growth.endswith("vLLM 1: 20.0 µs for each running request.")


lines_of_a_page = st.lists(
    st.sampled_from(["", "text", "## head", "<!-- measured: a.json -->", "<!-- measured: b.json k=v -->", END]),
    max_size=12,
)


@given(lines_of_a_page)
def test_filling_twice_is_filling_once_and_prose_stays(lines: list[str]):
    page = "\n".join(lines)
    once = fill(page, lambda name, options: f"of {name} {options.get('k', '')}")
    assert fill(once, lambda name, options: f"of {name} {options.get('k', '')}") == once
    assert fill(once, lambda name, options: "new") == fill(page, lambda name, options: "new")
    assert named(once) == named(page)
    if END not in lines:  # nothing may be replaced
        kept = [line for line in once.split("\n") if line and line != END and not line.startswith("of ")]
        assert kept == [line for line in lines if line]


def test_what_stands_between_a_marker_and_its_end_is_replaced():
    page = f"before\n<!-- measured: a.json -->\nold\n\nolder\n{END}\nafter\n"
    assert fill(page, lambda name, options: "new\n") == f"before\n<!-- measured: a.json -->\n\nnew\n\n{END}\nafter\n"
    assert BEGIN.fullmatch("text <!-- measured: a.json -->") is None


def test_the_command_fills_checks_and_names_what_it_can_not_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "measurements").mkdir()
    file, page = tmp_path / "measurements" / "serve-x.json", tmp_path / "page.md"
    file.write_text(json.dumps(result_of("vllm", "bf16")))
    page.write_text("# A page\n\n<!-- measured: serve-x.json -->\n\nprose\n")
    docs = ("--docs", str(tmp_path))
    assert main(["page", "--check", *docs]) == 1
    assert page.read_text().count("\n") == 5  # nothing was written
    assert main(["page", *docs]) == 0
    assert cells(page.read_text(), "") == ["vLLM, bfloat16", "Pageplane, bfloat16", "÷ vLLM"]
    assert page.read_text().endswith(f"{END}\n\nprose\n")
    assert main(["page", "--check", *docs]) == 0

    file.write_text(json.dumps(result_of("vllm", "bf16", "int8")))
    assert main(["page", "--check", *docs]) == 1
    capsys.readouterr()
    file.write_text("{}")
    assert main(["page", *docs]) == 2
    file.unlink()
    assert main(["page", *docs]) == 2
    told = capsys.readouterr().err
    assert "written neither by `bench serve`" in told and "serve-x.json: FileNotFoundError" in told


def test_numbers_have_three_digits():
    values = (0.0123456, 0.7361, 4.7482, 10.14, 99.96, 431.2, 15186.7, 0.0, None)
    assert [number(value) for value in values] == ["0.0123", "0.736", "4.75", "10.1", "100", "431", "15,187", "0", "–"]


def test_a_command_is_folded_at_its_flags():
    text = command("python -m bench serve " + " ".join(f"--flag-{i} 'a value {i}'" for i in range(12)))
    lines = text.split("```\n")[1].rstrip("\n`").split("\n")
    assert all(line.endswith(" \\") for line in lines[:-1]) and all(line.startswith("  --flag-") for line in lines[1:])
    assert max(map(len, lines)) <= 130


def test_the_gap_of_a_worker(tmp_path: Path) -> None:
    quantiles = {"p50": 65.4, "p99": 128.0, "max": 700.0}
    case = {"steps": 1500, "gap_us": quantiles, "gap_share": 0.012}
    case |= {"work_us": {"p50": 5550.0}, "scheduler_us": {"p50": 466.0}}
    machine = {"cpu": "C", "cores": 2, "memory_gib": 8, "commit": "abc"}
    result = {"machine": machine, "started_at": "2026-11-30T10:00", "command": "x --gap", "gaps": {"simulated": case}}
    (tmp_path / "gap.json").write_text(json.dumps(result))
    assert "| simulated | 65.4 | 128 | 1.2% | 5.55 | 466 | 1,500 |" in render(tmp_path / "gap.json", {})
