"""Flags mean what they say, and a wrong one is refused by name."""

from __future__ import annotations

import argparse

import pytest

from bench import serve
from bench.__main__ import main
from bench.target import TargetSpec, unique_names


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
    assert serve.workload_of(parse("--quick")) == serve.QUICK["random"]
    assert serve.workload_of(parse("--quick", "--input-len", "9")).input_len == 9
    load = serve.workload_of(parse("--num-prompts", "3", "--prefix-len", "5", "--token-ids", "7:9", "--seed", "4"))
    assert (load.num_prompts, load.input_len, load.output_len, load.prefix_len) == (3, 256, 64, 5)
    assert (load.min_token_id, load.max_token_id, load.seed) == (7, 9, 4)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
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
