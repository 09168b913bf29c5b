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


def backend_table() -> Table:
    table = Table(title="Attention backends, in the order in which they are tried")
    for column in ("backend", "here", "devices", "dtypes", "head_dim", "block", "window", "soft cap"):
        table.add_column(column)
    for spec in sorted(BACKENDS, key=lambda spec: spec.rank):
        table.add_row(
            spec.name,
            spec.missing() or "yes",
            ", ".join(sorted(spec.devices)) or "any",
            ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)) or "any",
            _head_dims(spec),
            "any" if spec.block_size_multiple == 1 else f"multiple of {spec.block_size_multiple}",
            "yes" if spec.window else "no",
            "yes" if spec.soft_cap else "no",
        )
    return table


def _head_dims(spec: BackendSpec) -> str:
    parts = []
    if spec.head_dim_multiple > 1:
        parts.append(f"multiple of {spec.head_dim_multiple}")
    if spec.max_head_dim is not None:
        parts.append(f"up to {spec.max_head_dim}")
    return ", ".join(parts) or "any"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels", description=__doc__)
    parser.add_argument("--head-dim", type=int, help="explain the choice for this head size")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--block-size", type=int, default=16, help="slots of a kernel block")
    parser.add_argument("--window", type=int, help="sliding window, in keys")
    parser.add_argument("--soft-cap", type=float)
    parser.add_argument("--attention-backend", default=AUTO, help="auto or a name")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    if args.head_dim is None:
        console.print(backend_table())
        for spec in BACKENDS:
            console.print(f"{spec.name}: {spec.summary}", markup=False)
        return 0
    shape = AttentionShape(args.device, DTYPES[args.dtype], args.head_dim, args.block_size, args.window, args.soft_cap)
    try:
        chosen, rejected = rank_backends(args.attention_backend, shape)
    except NoBackend as error:
        console.print(str(error), style="red", markup=False)
        return 1
    console.print(explain(args.attention_backend, shape, chosen, rejected), markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
