"""`python -m kernels`: the table of attention backends; with a shape, which one it gets and why not each other."""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table

from kernels.registry import BACKENDS, BackendSpec
from kernels.selector import AUTO, AttentionShape, NoBackend, explain, rank_backends

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

KV_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
FEATURES = ("window", "soft_cap", "non_causal", "sinks", "sliced_cache")


def backend_table() -> Table:
    """A column per backend, a row per thing that it may or may not do."""
    specs = sorted(BACKENDS, key=lambda spec: spec.rank)
    table = Table(title="Attention backends, in the order in which they are tried")
    table.add_column("")
    for spec in specs:
        table.add_column(spec.name)
    table.add_row("runs here", *(spec.missing() or "yes" for spec in specs))
    table.add_row("devices", *(", ".join(sorted(spec.devices)) or "any" for spec in specs))
    table.add_row("dtypes", *(_dtypes(spec.dtypes) or "any" for spec in specs))
    table.add_row("quantised caches", *(_dtypes(spec.kv_dtypes) or "no" for spec in specs))
    table.add_row("head_dim", *map(_head_dims, specs))
    blocks = (f"multiple of {spec.block_size_multiple}" if spec.block_size_multiple > 1 else "any" for spec in specs)
    table.add_row("block size", *blocks)
    for feature in FEATURES:
        table.add_row(feature.replace("_", " "), *("yes" if getattr(spec, feature) else "no" for spec in specs))
    return table


def _dtypes(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _head_dims(spec: BackendSpec) -> str:
    parts = []
    if spec.head_dim_multiple > 1:
        parts.append(f"multiple of {spec.head_dim_multiple}")
    if spec.max_head_dim is not None:
        parts.append(f"up to {spec.max_head_dim}")
    return ", ".join(parts) or "any"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels", description=__doc__)
    parser.add_argument("--explain", action="store_true", help="say what a worker would get (implied by --head-dim)")
    parser.add_argument("--head-dim", type=int, help="explain the choice for this head size (default: 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--block-size", type=int, default=16, help="slots of a kernel block")
    parser.add_argument("--window", type=int, help="sliding window, in keys")
    parser.add_argument("--soft-cap", type=float)
    parser.add_argument("--non-causal", action="store_true", help="every query sees all keys of its sequence")
    parser.add_argument("--sinks", action="store_true", help="a learned score per query head takes part in the softmax")
    parser.add_argument("--sliced-cache", action="store_true", help="a cache cut out of a bigger pool")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="auto: that of the queries")
    parser.add_argument("--attention-backend", default=AUTO, help="auto or a name")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    if args.head_dim is None and not args.explain:
        console.print(backend_table())
        for spec in BACKENDS:
            console.print(f"{spec.name}: {spec.summary}", markup=False)
        return 0
    shape = AttentionShape(
        device=args.device,
        dtype=DTYPES[args.dtype],
        head_dim=args.head_dim or 128,
        block_size=args.block_size,
        window=args.window,
        soft_cap=args.soft_cap,
        causal=not args.non_causal,
        sinks=args.sinks,
        kv_dtype=KV_DTYPES[args.kv_cache_dtype],
        sliced_cache=args.sliced_cache,
    )
    try:
        chosen, rejected = rank_backends(args.attention_backend, shape)
    except NoBackend as error:
        console.print(str(error), style="red", markup=False)
        return 1
    console.print(explain(args.attention_backend, shape, chosen, rejected), markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
