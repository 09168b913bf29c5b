"""The flags of `bench serve` that describe a load, their defaults, and the load they describe."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from bench.arrivals import Arrivals
from bench.load import ClosedLoop, Load, OpenLoop
from bench.long_arrivals import BesideStreams, LongArrivals
from bench.multi_turn import MultiTurn
from bench.trace import read_trace
from bench.trace_workload import TraceWorkload, choose_rows, cut_for_quick
from bench.workload import RandomWorkload, Workload

CONCURRENCY = 16
QUICK_STREAMS = 4

DEFAULTS: dict[str, Workload] = {load.kind: load for load in (RandomWorkload(), MultiTurn(), LongArrivals())}
"""Each kind without flags."""

QUICK: dict[str, Workload] = {
    "random": RandomWorkload(num_prompts=12, input_len=64, output_len=12),
    "multi-turn": MultiTurn(num_prompts=4, input_len=64, output_len=8, turns=3, turn_len=16),
    "long-arrivals": LongArrivals(num_prompts=2, input_len=16, output_len=512, long_input_len=256, long_output_len=4),
}
"""The same with --quick."""

KINDS = (*DEFAULTS, "trace")

FIELDS: dict[str, tuple[type, str]] = {
    "num_prompts": (int, "requests in each round; conversations; long prompts; of a trace, its first rows, else all"),
    "input_len": (int, "random tokens of each prompt; of each background stream's"),
    "output_len": (int, "tokens generated for each"),
    "prefix_len": (int, "tokens before them that prompts share"),
    "num_prefixes": (int, "different shared prefixes"),
    "turns": (int, "of each conversation"),
    "turn_len": (int, "tokens that each further turn adds to the history and the answer"),
    "think_s": (float, "mean of the exponentially distributed pause before a further turn"),
    "long_input_len": (int, "tokens of each long prompt"),
    "long_output_len": (int, "tokens generated for it"),
}
"""Flags for fields of workloads, and what they say."""

TRACE_FLAGS = ("trace", "trace_scale", "trace_block_size", "trace_max_len")


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workload", choices=KINDS, default="random",
        help="random: prompts, with --prefix-len shared prefixes; multi-turn: conversations that send their growing "
        "history; trace: the requests of --trace FILE when it says; long-arrivals: long prompts one after another, "
        "while --concurrency streams decode beside them (%(default)s)")  # fmt: skip
    add("--concurrency", type=int, metavar="N",
        help=f"clients, each with one request or conversation at a time ({CONCURRENCY}); with arrival times, the most "
        f"in flight (no limit); of long-arrivals, streams ({CONCURRENCY}; quick: {QUICK_STREAMS})")  # fmt: skip
    add(
        "--request-rate",
        type=float,
        metavar="R",
        help="open loop: so many requests arrive each second, whatever became of those before (default: closed loop)",
    )
    add("--burstiness", type=float, metavar="B",
        help="shape of their gamma-distributed gaps: 1 is Poisson, less is burstier (1)")  # fmt: skip
    for name, (kind, meaning) in FIELDS.items():
        add(_flag(name), type=kind, metavar="N", help=f"{meaning} ({_defaults(name)})")
    add("--trace", type=Path, metavar="FILE", help="JSON lines or CSV; its columns: bench/trace.py")
    add("--trace-scale", type=float, metavar="X", help="speed of its arrivals, 2 is twice as fast (1)")
    add("--trace-block-size", type=int, metavar="N",
        help=f"tokens that one of its hash or prefix ids stands for ({TraceWorkload.block_size})")  # fmt: skip
    add("--trace-max-len", type=int, metavar="N", help="leave out rows with more tokens in and out (none)")
    add("--token-ids", metavar="LOW:HIGH",
        help=f"range of the random prompt tokens ({Workload.min_token_id}:{Workload.max_token_id})")  # fmt: skip
    add("--seed", type=int, help=f"of all that is random ({Workload.seed})")


def workload_of(args: argparse.Namespace) -> Workload:
    """What the flags ask for. Raises ValueError."""
    common = {} if args.seed is None else {"seed": args.seed}
    if args.token_ids is not None:
        low, colon, high = args.token_ids.partition(":")
        if not (colon and low.isdecimal() and high.isdecimal()):
            raise ValueError(f"--token-ids {args.token_ids!r} is not LOW:HIGH")
        common |= {"min_token_id": int(low), "max_token_id": int(high)}
    if args.workload == "trace":
        _refuse(args, [name for name in FIELDS if name != "num_prompts"])
        return _trace_of(args, common)
    base = (QUICK if args.quick else DEFAULTS)[args.workload]
    known = {field.name for field in fields(base)}
    _refuse(args, [name for name in FIELDS if name not in known])
    _refuse(args, TRACE_FLAGS)
    return replace(base, **common, **{name: getattr(args, name) for name in FIELDS if getattr(args, name) is not None})


def load_of(args: argparse.Namespace, workload: Workload) -> Load:
    """How the flags want it offered. Raises ValueError."""
    if args.concurrency is not None and args.concurrency < 1:
        raise ValueError(f"--concurrency is {args.concurrency}; it must be at least 1")
    if args.request_rate is None and args.burstiness is not None:
        raise ValueError("--burstiness is that of arrivals at a --request-rate")
    if isinstance(workload, LongArrivals | TraceWorkload) and args.request_rate is not None:
        raise ValueError(f"--request-rate has no meaning for --workload {workload.kind}")
    if isinstance(workload, LongArrivals):
        return BesideStreams(workload, args.concurrency or (QUICK_STREAMS if args.quick else CONCURRENCY))
    if isinstance(workload, TraceWorkload):
        return OpenLoop(workload, None, args.concurrency)
    if args.request_rate is None:
        return ClosedLoop(workload, args.concurrency or CONCURRENCY)
    burstiness = 1.0 if args.burstiness is None else args.burstiness
    return OpenLoop(workload, Arrivals(args.request_rate, burstiness), args.concurrency)


def _trace_of(args: argparse.Namespace, common: dict[str, int]) -> TraceWorkload:
    if args.trace is None:
        raise ValueError("--workload trace needs --trace FILE")
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ValueError(f"--num-prompts is {args.num_prompts}; it must be at least 1")
    form, rows = read_trace(args.trace)
    chosen, left_out = choose_rows(rows, args.trace_max_len, args.num_prompts)
    return TraceWorkload(
        **common,
        trace=args.trace.name,
        form=form,
        rows=cut_for_quick(chosen) if args.quick else chosen,
        left_out=left_out,
        scale=TraceWorkload.scale if args.trace_scale is None else args.trace_scale,
        block_size=TraceWorkload.block_size if args.trace_block_size is None else args.trace_block_size,
    )


def _refuse(args: argparse.Namespace, names: list[str] | tuple[str, ...]) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(f"{_flag(name)} has no meaning for --workload {args.workload}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _defaults(name: str) -> str:
    """`random 256, long-arrivals 64; quick: …`, of those kinds that have the field."""
    texts = []
    for defaults in (DEFAULTS, QUICK):
        having = {kind: getattr(load, name) for kind, load in defaults.items() if hasattr(load, name)}
        if len(set(having.values())) == 1:
            texts.append(str(next(iter(having.values()))))
        else:
            texts.append(", ".join(f"{kind} {value}" for kind, value in having.items()))
    return texts[0] if texts[0] == texts[1] else f"{texts[0]}; quick: {texts[1]}"
