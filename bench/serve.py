"""`python -m bench serve`: start servers if asked, measure all targets in one interleaved run, report, stop them."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bench.load_flags import add_load_flags, load_of, workload_of
from bench.machine import describe_machine
from bench.processes import StartFailed, start_command, start_pageplane
from bench.progress import ProgressBars
from bench.report import print_result
from bench.results import Result, TargetResult
from bench.rounds import measure
from bench.slo import Slo
from bench.target import Target, TargetError, TargetSpec, unique_names

QUICK_BUDGET_S = (
    30.0  # from the start of the command: no round that would end later begins, but for each target's first
)

EXAMPLES = """\
examples:
  python -m bench serve --quick
      a server that runs already, found as `python -m client` finds it
  python -m bench serve --start-pageplane "--workers 2" \\
      --start "env VLLM_CPU_KVCACHE_SPACE=2 vllm serve FOLDER --served-model-name m --port 8101" \\
      --ready-url http://127.0.0.1:8101/health \\
      --target pageplane --target openai=http://127.0.0.1:8101,model=m,name=vllm --json result.json
      both started, measured A B A B A B, and stopped
  python -m bench serve --request-rate 4 --slo ttft:500,itl:100
      requests arrive by themselves, four a second on average; how many are served well enough?
  python -m bench serve --workload trace --trace conversation_trace.jsonl --trace-max-len 4096 --num-prompts 200
The loads, the numbers and the keys of the JSON file are documented in docs/benchmarks.md.
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
    add_load_flags(parser)
    add("--slo", "--goodput", nargs="+", metavar="KEY:MS",
        help="count the requests that meet all of these, for example ttft:500,itl:100,e2e:5000; itl: the p99 of a "
        "request's intervals, tpot: their mean")  # fmt: skip
    add("--repeat", type=int, help="measured rounds (3; quick: 2)")
    add("--no-warmup", action="store_true", help="don't run and discard one round of each target first")
    add("--request-timeout", type=float, default=300.0, metavar="S", help="then it counts as failed (%(default)s)")
    add("--quick", action="store_true",
        help=f"a small load; no round but the first that would end after {QUICK_BUDGET_S:g} s, starting servers "
        "included: done in under 45 s")  # fmt: skip
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
    began = time.monotonic()
    try:
        specs = [TargetSpec.parse(text) for text in args.target or ["pageplane"]]
        load = load_of(args, workload_of(args))
        repeat = args.repeat if args.repeat is not None else 2 if args.quick else 3
        slo = None if args.slo is None else Slo.parse(args.slo)
        if repeat < 1:
            raise ValueError(f"--repeat is {repeat}; it must be at least 1")
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
                load=load,
                slo=slo,
                targets=[
                    TargetResult(name, spec.kind, spec.address, startup_s)
                    for name, spec, startup_s in zip(unique_names(specs), specs, startup, strict=True)
                ],
            )
            budget_s = QUICK_BUDGET_S - (time.monotonic() - began) if args.quick else None
            asyncio.run(_measure(args, specs, result, repeat, budget_s, console))
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
    args: argparse.Namespace,
    specs: list[TargetSpec],
    result: Result,
    repeat: int,
    budget_s: float | None,
    console: Console,
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
                pairs, result.load, repeat, bars,
                slo=result.slo,
                warmup=not args.no_warmup,
                request_timeout_s=args.request_timeout,
                budget_s=budget_s,
            )  # fmt: skip
