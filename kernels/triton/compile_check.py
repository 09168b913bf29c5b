"""Ahead-of-time proof, without a GPU: every shipped variant of the kernels compiles, and compiles to what it should.

    python -m kernels.triton.compile_check                  # everything; exit code 1 if a variant breaks its budget
    python -m kernels.triton.compile_check --only decode --target sm_90
    python -m kernels.triton.compile_check --markdown docs/kernels.md   # and its tables renewed

`variants` lists the forms, `budgets` what they may cost. Registers and spills come from the machine code (NVIDIA: what
cuobjdump, part of Triton's wheel, says of the cubin; AMD: the metadata of the assembly), widths of loads and matrix
instructions from the PTX or the assembly, buffers from Triton's own intermediate form. Triton caches what it compiled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from kernels.triton.budgets import ANY_TILE, ROWS, TARGETS, Budget, Measured, Target, budget_of, problems
from kernels.triton.variants import VARIANTS, Variant

BUDGETS_HEADING, VARIANTS_HEADING = "## Budgets", "## Compiled variants"
_WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


@dataclass(frozen=True)
class Result:
    """One variant on one target, held against its budget. `broken`: in words, empty if it is kept."""

    variant: str
    target: str
    budget: Budget
    measured: Measured
    broken: tuple[str, ...]

    def __str__(self) -> str:
        cost = self.measured
        return (
            f"{self.target:6} {self.variant:52} {cost.registers:3} regs {cost.spill_bytes:4} B spilled "
            f"{cost.shared_bytes / 1024:5.0f} KiB shared  {'; '.join(self.broken) or 'ok'}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.compile_check", description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="+", default=list(TARGETS), choices=list(TARGETS), help="default: all")
    parser.add_argument("--only", default="", metavar="TEXT", help="only variants whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile (default: 2)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="renew the tables in this document")
    options = parser.parse_args(arguments)
    chosen = [number for number, variant in enumerate(VARIANTS) if options.only in str(variant)]
    if not chosen:
        parser.error(f"no variant is called {options.only!r}")
    if options.markdown and (options.only or len(options.target) < len(TARGETS)):
        parser.error("--markdown is a table of all variants on all targets")
    cases = [(number, name) for name in options.target for number in chosen if name in VARIANTS[number].targets]
    results = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(_check_case, cases):
            print(result, flush=True)
            results.append(result)
    if options.markdown:
        document = with_table(options.markdown.read_text(), BUDGETS_HEADING, table_of_budgets())
        options.markdown.write_text(with_table(document, VARIANTS_HEADING, table_of_variants(results)))
    broken = sum(bool(result.broken) for result in results)
    print(f"{len(results)} compiled with triton {triton.__version__}, {broken} over budget")
    return 1 if broken else 0


def _check_case(case: tuple[int, str]) -> Result:
    number, target = case
    return check(VARIANTS[number], TARGETS[target])


def check(variant: Variant, target: Target) -> Result:
    """Compile one variant for one target and hold it against its budget."""
    call = variant.call(target)
    source, options = call.source()
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    compiled: Any = triton.compile(source, target=gpu, options=options)
    measured = (_measure_nvidia if target.backend == "cuda" else _measure_amd)(compiled)
    budget = budget_of(target.name, variant.kind, call.tile_elements)
    return Result(str(variant), target.name, budget, measured, tuple(problems(measured, budget, target)))


def _measure_nvidia(compiled: Any) -> Measured:
    ptx = compiled.asm["ptx"]
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(program), "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    copies = [int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], (0x\w+|\d+)", ptx)]
    loads = [int(n or 1) * int(bits) // 8 for n, bits in re.findall(r"ld\.global[\w:.]*?(?:\.v(\d))?\.b(\d+)\b", ptx)]
    if "cp.async.bulk" in ptx:  # whole tiles
        copies.append(16)
    return Measured(
        registers=int(re.findall(r"REG:(\d+)", usage)[0]),
        spill_bytes=int(re.findall(r"STACK:(\d+)", usage)[0]),  # spills count as stack, LOCAL stays 0
        shared_bytes=int(compiled.metadata.shared),
        kv_buffers=_kv_buffers(compiled),
        load_bytes=min(copies) if copies else max(loads, default=0),
        matrix_units="wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else None,
    )


def _measure_amd(compiled: Any) -> Measured:
    assembly = compiled.asm["amdgcn"]

    def count(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", assembly)[0])

    loads = [_WIDTHS[width] for width in re.findall(r"(?:global|buffer)_load_(dword(?:x[234])?)\b", assembly)]
    return Measured(
        registers=count("vgpr_count"),
        spill_bytes=count("private_segment_fixed_size"),  # spilled scalars go to vector registers, not to memory
        shared_bytes=int(compiled.metadata.shared),
        kv_buffers=_kv_buffers(compiled),
        load_bytes=max(loads, default=0),
        matrix_units="mfma" if "v_mfma" in assembly else None,
    )


def _kv_buffers(compiled: Any) -> int:
    """The fewest buffers of the K and V tiles in shared memory; 0 if there are none."""
    return min(map(int, re.findall(r"ttg\.local_alloc[^\n]*memdesc<(\d+)x\d+x\d+x", compiled.asm["ttgir"])), default=0)


def table_of_budgets() -> str:
    """ROWS as a Markdown table."""
    lines = [
        "| target | kind | K tile | registers | shared, KiB | spills, B | K/V buffers | bytes a load | matrix units |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        budget, tile = row.budget, "any" if row.tile_elements == ANY_TILE else f"≤ {row.tile_elements}"
        lines.append(
            f"| {row.target} | {row.kind} | {tile} "
            f"| ≤ {budget.registers} | ≤ {budget.shared_kib} | ≤ {budget.spill_bytes} "
            f"| {_at_least(budget.kv_buffers)} | {_at_least(budget.load_bytes)} | {budget.matrix_units or '–'} |"
        )
    return "\n".join(lines) + "\n"


def _at_least(number: int) -> str:
    return f"≥ {number}" if number else "–"


def table_of_variants(results: Sequence[Result]) -> str:
    """A row per variant, a column per target: registers · KiB of shared memory · K/V buffers · bytes a load."""
    cells = {(result.variant, result.target): result.measured for result in results}
    lines = [f"| variant | {' | '.join(TARGETS)} |", "|---|" + "---|" * len(TARGETS)]
    for variant in map(str, VARIANTS):
        row = []
        for target in TARGETS:
            cost = cells.get((variant, target))
            row.append("–" if cost is None else _cell(cost))
        lines.append(f"| {variant} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _cell(cost: Measured) -> str:
    parts = [str(cost.registers), str(-(-cost.shared_bytes // 1024)), str(cost.kv_buffers or "–"), str(cost.load_bytes)]
    return " · ".join([*parts, *filter(None, [cost.matrix_units])])


def with_table(document: str, heading: str, rows: str) -> str:
    """The document with another first table under a heading. Raises ValueError if there is none."""
    before, found, after = document.partition(f"\n{heading}\n")
    old = re.search(r"(?:^\|.*\n)+", after.split("\n## ")[0], flags=re.MULTILINE)
    if not found or not old:
        raise ValueError(f"the document has no table under {heading!r}")
    return before + found + after[: old.start()] + rows + after[old.end() :]


if __name__ == "__main__":
    sys.exit(main())
