"""Ahead-of-time proof, without a GPU: every shipped variant of the kernels compiles, and compiles to what it should.

`python -m kernels.triton.compile_check [--arch 80 90] [--table FILE]`: for each variant registers, spills, shared
memory and the instructions that matter; exit code 1 if one breaks its budget. Triton's wheel carries the tools.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton.attention import merge_splits_kernel, paged_attention_kernel
from kernels.triton.cache import write_kv_kernel
from kernels.triton.tiles import Kind, pick_tiles

SHARED_LIMIT = {80: 164 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one program may have."""


@dataclass(frozen=True)
class Variant:
    """One way in which serving calls a kernel. kind: decode, prefill, long_prefill, merge or write."""

    kind: str
    dtype: str
    head_dim: int
    group: int
    page: int
    window: int = 0
    soft_cap: bool = False
    kv_dtype: str = ""  # of the cache, if it is quantised: fp8e4nv or i8
    sinks: bool = False
    causal: bool = True

    def ships_on(self, arch: int) -> bool:
        """Whether the backend would ask for it: float8 needs 8.9, and tiles for long prefills are those of 9.0."""
        return (self.kv_dtype != "fp8e4nv" or arch >= 89) and (self.kind != "long_prefill" or arch >= 90)

    def __str__(self) -> str:
        extra = (f" window {self.window}" if self.window else "") + (" soft cap" if self.soft_cap else "")
        extra += (f" cache {self.kv_dtype}" if self.kv_dtype else "") + (" sinks" if self.sinks else "")
        extra += "" if self.causal else " not causal"
        return f"{self.kind.replace('_', ' ')} {self.dtype} D={self.head_dim} G={self.group} page {self.page}{extra}"


@dataclass(frozen=True)
class Compiled:
    """What a variant compiled to on one architecture."""

    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    kv_buffers: int
    wgmma: bool
    problems: tuple[str, ...]


VARIANTS: tuple[Variant, ...] = (
    *(
        Variant(kind, dtype, 128, 4, page)
        for kind in ("decode", "prefill")
        for dtype in ("bf16", "fp16")
        for page in (16, 64, 128)
    ),
    *(Variant(kind, "bf16", 64, 3, 16) for kind in ("decode", "prefill")),
    *(Variant(kind, "bf16", 128, 7, 64, window=4096) for kind in ("decode", "prefill")),
    *(Variant(kind, "bf16", 128, 4, 64, soft_cap=True) for kind in ("decode", "prefill")),
    *(Variant(kind, "bf16", 80, 4, 64) for kind in ("decode", "prefill")),
    *(Variant(kind, "bf16", 256, 2, 64, window=4096) for kind in ("decode", "prefill")),
    *(Variant("long_prefill", "bf16", head_dim, 4, page) for head_dim in (64, 128) for page in (16, 64)),
    *(
        Variant(kind, "bf16", 128, 4, page, kv_dtype=kv_dtype)
        for kv_dtype, page in (("fp8e4nv", 16), ("fp8e4nv", 64), ("i8", 64))
        for kind in ("decode", "prefill", "long_prefill")
    ),
    *(Variant(kind, "bf16", 64, 8, 64, window=128, sinks=True) for kind in ("decode", "prefill", "long_prefill")),
    *(Variant(kind, "bf16", 128, 4, 64, causal=False) for kind in ("decode", "prefill", "long_prefill")),
    *(Variant(kind, "bf16", head_dim, 4, 64) for head_dim in (96, 112, 192) for kind in ("decode", "prefill")),
    *(Variant("decode", "fp32", head_dim, 4, 16) for head_dim in (64, 128)),
    Variant("write", "bf16", 128, 4, 16, kv_dtype="fp8e4nv"),
    Variant("write", "bf16", 128, 4, 16, kv_dtype="i8"),
    Variant("merge", "bf16", 128, 4, 64),
    Variant("write", "bf16", 128, 4, 16),
    Variant("write", "bf16", 80, 4, 16),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.triton.compile_check", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities (default: 80 90)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", type=Path, help="write the results as a Markdown table")
    arguments = parser.parse_args()
    cases = [(variant, arch) for arch in arguments.arch for variant in VARIANTS if variant.ships_on(arch)]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(_check_case, cases))
    for (variant, _), result in zip(cases, results, strict=True):
        verdict = "; ".join(result.problems) or "ok"
        print(
            f"sm_{result.arch} {variant!s:46} {result.registers:3} regs {result.spill_bytes:4} B spilled "
            f"{result.shared_bytes // 1024:4} KiB shared  {verdict}"
        )
    if arguments.table:
        arguments.table.write_text(table(zip(cases, results, strict=True)))
    return 1 if any(result.problems for result in results) else 0


def _check_case(case: tuple[Variant, int]) -> Compiled:
    return check(*case)


def check(variant: Variant, arch: int) -> Compiled:
    """Compile one variant for one architecture and hold it against its budget."""
    source, options = _source(variant, arch)
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", str(cubin))
        sass = _run("nvdisasm", "-c", str(cubin))
    registers = int(re.findall(r"REG:(\d+)", usage)[0])
    spills = int(re.findall(r"STACK:(\d+)", usage)[0])
    shared = int(compiled.metadata.shared)
    buffers = [int(n) for n in re.findall(r"ttg\.local_alloc[^\n]*memdesc<(\d+)x\d+x\d+x", compiled.asm["ttgir"])]
    wgmma, wide = "HGMMA" in sass, bool(re.search(r"LDGSTS\.E\.\S*128|LDG\.E\.\S*128|UTMALDG", sass))
    problems = []
    if spills:
        problems.append(f"{spills} bytes spilled")
    if registers > 255:
        problems.append(f"{registers} registers")
    if shared > SHARED_LIMIT[arch]:
        problems.append(f"{shared} bytes of shared memory")
    if variant.kind in ("decode", "prefill", "long_prefill"):
        if not wide:
            problems.append("no 16-byte loads")
        if not buffers or min(buffers) < 2:
            problems.append(f"K/V buffers {buffers}")
    if "prefill" in variant.kind and arch == 90 and not wgmma:
        problems.append("no wgmma")
    return Compiled(arch, registers, spills, shared, min(buffers, default=0), wgmma, tuple(problems))


def _source(variant: Variant, arch: int) -> tuple[ASTSource, dict[str, int]]:
    """The kernel as the backend would call it: pointers and strides known to be multiples of 16."""
    element = f"*{variant.dtype}"
    cache = f"*{variant.kv_dtype or variant.dtype}"
    scales: dict[str, str | None] = dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32" if variant.kv_dtype else None)
    d_pad = triton.next_power_of_2(variant.head_dim)
    if variant.kind == "write":
        return _ast(
            write_kv_kernel,
            {
                **dict.fromkeys(("k_ptr", "v_ptr"), element),
                **dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), cache),
                **scales,
                "slots_ptr": "*i64",
            },
            {
                "H": 8,
                "HEADS": 8,
                "D": variant.head_dim,
                "D_PAD": d_pad,
                "PAGE": variant.page,
                "QUANTISED": bool(variant.kv_dtype),
            },
        ), {}
    tiles = pick_tiles(
        group_size=variant.group,
        head_dim=variant.head_dim,
        page=variant.page,
        kind=Kind[variant.kind.upper()] if variant.kind != "merge" else Kind.PREFILL,
        kv_bytes=1 if variant.kv_dtype else 4 if variant.dtype == "fp32" else 2,
        hopper=arch >= 90,
    )
    shape = {"G": variant.group, "D": variant.head_dim, "D_PAD": d_pad, "BLOCK_M": tiles.block_m}
    pointers: dict[str, str | None] = {
        "out_ptr": element, "partial_ptr": "*fp32", "partial_lse_ptr": "*fp32", "query_start_ptr": "*i32",
    }  # fmt: skip
    if variant.kind == "merge":
        return _ast(merge_splits_kernel, {**pointers, "merges_ptr": "*i32"}, shape), {}
    pointers |= {"q_ptr": element, "k_ptr": cache, "v_ptr": cache, **scales}
    pointers["sinks_ptr"] = "*fp32" if variant.sinks else None
    pointers |= dict.fromkeys(("table_ptr", "seq_len_ptr", "items_ptr"), "*i32")
    constants = {
        **shape, "PAGE": variant.page, "TILE": tiles.tile, "WINDOW": variant.window, "SOFT_CAP": variant.soft_cap,
        "CONTIGUOUS": tiles.contiguous, "CAUSAL": variant.causal, "SINKS": variant.sinks,
        "QUANTISED": bool(variant.kv_dtype),
    }  # fmt: skip
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return _ast(paged_attention_kernel, pointers, constants), options


def _ast(kernel: Any, pointers: Mapping[str, str | None], constants: dict[str, Any]) -> ASTSource:
    names = kernel.arg_names
    constants = constants | {name: None for name, pointer in pointers.items() if pointer is None}
    scalars = dict.fromkeys(("scale", "soft_cap", "limit"), "fp32")
    signature = {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = str(pointers[name])
        else:
            signature[name] = scalars.get(name, "i32")
    aligned = [["tt.divisibility", 16]]
    unaligned = kernel.do_not_specialize_on_alignment or ()
    not_counts = [
        (index,)
        for index, name in enumerate(names)
        if (name in pointers and name not in constants and name not in unaligned)
        or (name.startswith("stride") and name != "stride_table")
    ]
    return ASTSource(kernel, signature, constants, dict.fromkeys(not_counts, aligned))


def _run(tool: str, *arguments: str) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([str(program), *arguments], check=True, capture_output=True, text=True).stdout


def table(results: Iterable[tuple[tuple[Variant, int], Compiled]]) -> str:
    """The results as a Markdown table."""
    lines = ["| arch | variant | registers | shared, KiB | K/V buffers | wgmma |", "|---|---|---|---|---|---|"]
    for (variant, arch), result in results:
        lines.append(
            f"| sm_{arch} | {variant} | {result.registers} | {result.shared_bytes // 1024} | "
            f"{result.kv_buffers or '–'} | {'yes' if result.wgmma else '–'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
