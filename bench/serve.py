"""`python -m bench serve`: start servers if asked, measure all targets in one interleaved run, report, stop them."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bench.load import ClosedLoop, Load
from bench.long_arrivals import BesideStreams, LongArrivals
from bench.machine import describe_machine
from bench.processes import StartFailed, start_command, start_pageplane
from bench.progress import ProgressBars
from bench.report import print_result
from bench.results import Result, TargetResult
from bench.rounds import measure
from bench.target import Target, TargetError, TargetSpec, unique_names
from bench.workload import Workload

WORKLOADS: dict[str, Workload] = {load.kind: load for load in (Workload(), LongArrivals())}
"""The defaults of each kind."""

QUICK: dict[str, Workload] = {
    "random": Workload(num_prompts=16, input_len=64, output_len=16),
    "long-arrivals": LongArrivals(num_prompts=2, input_len=16, output_len=512, long_input_len=512, long_output_len=4),
}
"""The same with --quick."""

QUICK_BUDGET_S = 30.0  # one more round may begin until then; a round of QUICK takes a few seconds

LENGTHS = {
    "num_prompts": "requests in each round; the long prompts of long-arrivals",
    "input_len": "random tokens of each prompt; of long-arrivals, of each background stream's",
    "output_len": "tokens generated for each",
    "prefix_len": "tokens before them that prompts share",
    "num_prefixes": "different shared prefixes",
    "long_input_len": "tokens of each long prompt",
    "long_output_len": "tokens generated for it",
}
"""Flags for the fields of workloads, and what they say."""

EXAMPLES = """\
examples:
  python -m bench serve --quick
      a server that runs already, found as `python -m client` finds it
  python -m bench serve --start-pageplane "--workers 2" \\
      --start "env VLLM_CPU_KVCACHE_SPACE=2 vllm serve FOLDER --served-model-name m --port 8101" \\
      --ready-url http://127.0.0.1:8101/health \\
      --target pageplane --target openai=http://127.0.0.1:8101,model=m,name=vllm --json result.json
      both started, measured A B A B A B, and stopped
The keys of the JSON file are documented in bench/results.py, the definitions of the numbers in bench/stats.py.
"""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "serve",
        help="throughput and latency of one or several servers, side by side",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", action="append", metavar="TARGET", default=[],
        help="pageplane[=ENDPOINT][,name=N] or openai=URL[,model=M][,name=N]; repeat it to compare: "
        "the first is the subject of all ratios (default: pageplane)")  # fmt: skip
    add("--workload", choices=list(WORKLOADS), default="random",
        help="random prompts, with --prefix-len shared prefixes; long-arrivals: long prompts one after another, while "
        "--concurrency streams decode beside them (%(default)s)")  # fmt: skip
    add("--concurrency", type=int, default=16, help="clients, each with one request at a time (%(default)s)")
    for name, meaning in LENGTHS.items():
        add(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{meaning} ({_defaults(name)})")
    add("--token-ids", metavar="LOW:HIGH",
        help=f"range of the random prompt tokens ({Workload.min_token_id}:{Workload.max_token_id})")  # fmt: skip
    add("--seed", type=int, help=f"of all that is random ({Workload.seed})")
    add("--repeat", type=int, help="measured rounds (3; quick: 2)")
    add("--no-warmup", action="store_true", help="don't run and discard one round of each target first")
    add("--request-timeout", type=float, default=300.0, metavar="S", help="then it counts as failed (%(default)s)")
    add("--quick", action="store_true",
        help=f"a small load; no round starts after {QUICK_BUDGET_S:g} s: done in under 45 s "
        "(once the servers are ready)")  # fmt: skip
    add("--start-pageplane", metavar="ARGS",
        help="start `launch.py ARGS` and measure it as the first pageplane target without an endpoint")  # fmt: skip
    add("--start", action="append", default=[], metavar="CMD", help="start a server (no shell: `env A=B cmd …`)")
    add("--ready-url", action="append", default=[], metavar="URL",
        help="ready when this answers 2xx; one for each --start, in order")  # fmt: skip
    add("--start-timeout", type=float, default=300.0, metavar="S", help="for a server to be ready (%(default)s)")
    add("--log-dir", type=Path, metavar="DIR", help="output of started servers (a temporary folder)")
    add("--json", type=Path, metavar="FILE", help="write all numbers")
    add("--plot", type=Path, metavar="FILE", help="write a picture (.png, .svg, .pdf)")
    parser.set_defaults(run=run)


def workload_of(args: argparse.Namespace) -> Workload:
    """The load that the flags describe. Raises ValueError."""
    base = (QUICK if args.quick else WORKLOADS)[args.workload]
    changes = {name: getattr(args, name) for name in (*LENGTHS, "seed") if getattr(args, name) is not None}
    if args.token_ids is not None:
        low, colon, high = args.token_ids.partition(":")
        if not (colon and low.isdecimal() and high.isdecimal()):
            raise ValueError(f"--token-ids {args.token_ids!r} is not LOW:HIGH")
        changes |= {"min_token_id": int(low), "max_token_id": int(high)}
    known = {field.name for field in fields(base)}
    for name in changes:
        if name not in known:
            raise ValueError(f"--{name.replace('_', '-')} has no meaning for --workload {args.workload}")
    return replace(base, **changes)


def load_of(args: argparse.Namespace, workload: Workload) -> Load:
    """How the workload is offered."""
    if isinstance(workload, LongArrivals):
        return BesideStreams(workload, args.concurrency)
    return ClosedLoop(workload, args.concurrency)


def _defaults(name: str) -> str:
    """`256; long-arrivals: 64; quick: 64, 16`, of those kinds that have the field."""
    texts = []
    for defaults in (WORKLOADS, QUICK):
        having = {kind: getattr(load, name) for kind, load in defaults.items() if hasattr(load, name)}
        if len(set(having.values())) == 1:
            texts.append(str(next(iter(having.values()))))
        else:
            texts.append(", ".join(f"{kind} {value}" for kind, value in having.items()))
    return texts[0] if texts[0] == texts[1] else f"{texts[0]}; quick: {texts[1]}"


def make_target(name: str, spec: TargetSpec, timeout_s: float) -> Target:
    """The client of a target. What it needs is imported here, so that one kind doesn't need the other's packages."""
    if spec.kind == "openai":
        from bench.openai_target import OpenAITarget

        assert spec.address is not None, "TargetSpec.parse sees to it"
        return OpenAITarget(name, spec.address, spec.options.get("model"), timeout_s)
    from bench.pageplane_target import PageplaneTarget

    return PageplaneTarget(name, spec.address)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 1 if a request failed, or 2 if nothing could be measured."""
    console = Console(stderr=True)
    try:
        specs = [TargetSpec.parse(text) for text in args.target or ["pageplane"]]
        workload = workload_of(args)
        load = load_of(args, workload)
        repeat = args.repeat if args.repeat is not None else 2 if args.quick else 3
        if repeat < 1 or args.concurrency < 1:
            raise ValueError("--repeat and --concurrency must be at least 1")
        if len(args.start) != len(args.ready_url):
            raise ValueError(f"{len(args.start)} --start but {len(args.ready_url)} --ready-url: one for each")
        if args.start_pageplane is not None and not any(s.kind == "pageplane" and not s.address for s in specs):
            raise ValueError("--start-pageplane without a pageplane target to measure it as")
        with ExitStack() as servers:
            startup = _start_servers(args, specs, servers, console)
            result = Result(
                command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
                started_at=datetime.now(UTC).isoformat(timespec="seconds"),
                machine=describe_machine(),
                workload=workload,
                concurrency=args.concurrency,
                targets=[
                    TargetResult(name, spec.kind, spec.address, startup_s)
                    for name, spec, startup_s in zip(unique_names(specs), specs, startup, strict=True)
                ],
            )
            asyncio.run(_measure(args, specs, load, result, repeat, console))
    except (ValueError, TargetError, StartFailed) as error:
        console.print(f"[red]bench serve:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    print_result(result, Console())
    if args.json is not None:
        result.write(args.json)
    if args.plot is not None:
        from bench.plot import write_plot

        write_plot(result, args.plot)
    return 1 if any(run.failed for target in result.targets for run in target.runs) else 0


def _start_servers(
    args: argparse.Namespace, specs: list[TargetSpec], stack: ExitStack, console: Console
) -> list[float | None]:
    """Start what the flags say, one after the other; seconds to ready, for each target that was started."""
    startup: list[float | None] = [None] * len(specs)
    if args.start_pageplane is None and not args.start:
        return startup
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
    logs = args.log_dir or scratch
    logs.mkdir(parents=True, exist_ok=True)
    for i, (command, url) in enumerate(zip(args.start, args.ready_url, strict=True)):
        with console.status(f"waiting for {url} …"):
            server, took = start_command(command, url, logs / f"server-{i}.log", args.start_timeout)
        stack.enter_context(server)
        console.print(f"{url} ready after {took:.1f} s (pid {server.pid})", highlight=False)
        for j, spec in enumerate(specs):
            if spec.kind == "openai" and spec.address and url.startswith(spec.address.rstrip("/")):
                startup[j] = took
    if args.start_pageplane is not None:
        ready_file = scratch / "ready.json"
        with console.status("waiting for Pageplane …"):
            server, took, ready = start_pageplane(
                args.start_pageplane, ready_file, logs / "pageplane.log", args.start_timeout
            )
        stack.enter_context(server)
        console.print(f"Pageplane ready after {took:.1f} s (pid {server.pid})", highlight=False)
        j = next(j for j, spec in enumerate(specs) if spec.kind == "pageplane" and not spec.address)
        specs[j] = TargetSpec("pageplane", ready["endpoints"]["client"], specs[j].options)
        startup[j] = took
    return startup


async def _measure(
    args: argparse.Namespace, specs: list[TargetSpec], load: Load, result: Result, repeat: int, console: Console
) -> None:
    async with AsyncExitStack() as stack:
        pairs: list[tuple[Target, TargetResult]] = []
        for spec, target_result in zip(specs, result.targets, strict=True):
            target = make_target(target_result.name, spec, args.request_timeout)
            stack.push_async_callback(target.close)
            await target.open()
            pairs.append((target, target_result))
        with ProgressBars(console) as bars:
            await measure(
                pairs, load, repeat, bars,
                warmup=not args.no_warmup,
                request_timeout_s=args.request_timeout,
                budget_s=QUICK_BUDGET_S if args.quick else None,
            )  # fmt: skip
