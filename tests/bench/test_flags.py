"""Flags mean what they say, and a wrong one is refused by name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import serve
from bench.__main__ import main
from bench.arrivals import Arrivals
from bench.load import ClosedLoop, OpenLoop
from bench.load_flags import QUICK, load_of, workload_of
from bench.long_arrivals import BesideStreams, LongArrivals
from bench.multi_turn import MultiTurn
from bench.target import TargetSpec, unique_names
from bench.workload import RandomWorkload


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *flags])


def test_targets_are_read():
    assert TargetSpec.parse("pageplane") == TargetSpec("pageplane", None)
    assert TargetSpec.parse("pageplane=ipc:///run/x=1,name=us") == TargetSpec(
        "pageplane", "ipc:///run/x=1", {"name": "us"}
    )
    assert TargetSpec.parse("openai=http://127.0.0.1:8101,model=m") == TargetSpec(
        "openai", "http://127.0.0.1:8101", {"model": "m"}
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("vllm=x", "vllm"),
        ("openai", "base URL"),
        ("openai=http://x,modle=m", "modle=m"),
        ("pageplane,model=m", "model=m"),
    ],
)
def test_a_target_that_can_not_be_read_is_refused_by_name(text: str, named: str):
    with pytest.raises(ValueError, match=named):
        TargetSpec.parse(text)


def test_names_are_unique():
    specs = [TargetSpec.parse(t) for t in ("pageplane", "pageplane=ipc://b", "openai=http://c,name=pageplane-2")]
    assert unique_names(specs) == ["pageplane", "pageplane-2", "pageplane-2-2"]


def test_quick_changes_only_the_defaults():
    assert workload_of(parse("--quick")) == QUICK["random"]
    assert workload_of(parse("--quick", "--input-len", "9")).input_len == 9
    load = workload_of(parse("--num-prompts", "3", "--prefix-len", "5", "--token-ids", "7:9", "--seed", "4"))
    assert (load.num_prompts, load.input_len, load.output_len, load.prefix_len) == (3, 256, 64, 5)
    assert (load.min_token_id, load.max_token_id, load.seed) == (7, 9, 4)


def test_each_kind_of_load_has_its_flags():
    conversations = workload_of(parse("--workload", "multi-turn", "--turns", "7", "--think-s", "0.5"))
    assert conversations == MultiTurn(turns=7, think_s=0.5)
    beside = workload_of(parse("--workload", "long-arrivals", "--long-input-len", "99", "--output-len", "50"))
    assert beside == LongArrivals(long_input_len=99, output_len=50)
    assert load_of(parse("--workload", "long-arrivals", "--concurrency", "3"), beside) == BesideStreams(beside, 3)


def test_a_rate_opens_the_loop():
    flags = parse("--request-rate", "2.5", "--burstiness", "0.5")
    assert load_of(flags, RandomWorkload()) == OpenLoop(RandomWorkload(), Arrivals(2.5, 0.5), None)
    flags = parse("--request-rate", "2", "--concurrency", "8")
    assert load_of(flags, RandomWorkload()) == OpenLoop(RandomWorkload(), Arrivals(2.0), 8)
    assert load_of(parse(), RandomWorkload()) == ClosedLoop(RandomWorkload(), 16)


def test_a_trace_is_read_from_its_file(tmp_path: Path):
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,input_len,output_len\n" + "".join(f"{i},{i},9\n" for i in range(1, 31)))
    workload = workload_of(
        parse("--workload", "trace", "--trace", str(file), "--trace-scale", "2", "--trace-max-len", "29")
    )
    assert (workload.num_requests, workload.left_out, workload.span_s) == (20, 10, 9.5)
    assert load_of(parse("--workload", "trace"), workload) == OpenLoop(workload, None, None)
    assert workload_of(parse("--workload", "trace", "--trace", str(file), "--num-prompts", "4")).num_requests == 4
    assert workload_of(parse("--workload", "trace", "--trace", str(file), "--quick")).span_s <= 4


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--workload", "trace"], "--trace FILE"),
        (["--workload", "trace", "--trace", "/nowhere/t.csv"], "/nowhere/t.csv"),
        (["--workload", "trace", "--input-len", "5"], "--input-len has no meaning"),
        (["--turns", "2"], "--turns has no meaning for --workload random"),
        (["--trace-scale", "2"], "--trace-scale has no meaning"),
        (["--workload", "long-arrivals", "--request-rate", "2"], "--request-rate has no meaning"),
        (["--burstiness", "2"], "--request-rate"),
        (["--request-rate", "0"], "request_rate is 0.0"),
        (["--slo", "ttft=5"], "'ttft=5'"),
        (["--token-ids", "9"], "LOW:HIGH"),
        (["--num-prompts", "0"], "num_prompts"),
        (["--repeat", "0"], "--repeat"),
        (["--concurrency", "0"], "--concurrency"),
        (["--start", "x"], "--ready-url"),
        (["--start-pageplane", "", "--target", "pageplane=ipc://x"], "--start-pageplane"),
        (["--target", "nonsense"], "nonsense"),
    ],
)
def test_flags_that_can_not_work_are_refused_by_name(flags, named: str, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", *flags]) == 2
    assert named in capsys.readouterr().err.replace("\n", " ")
