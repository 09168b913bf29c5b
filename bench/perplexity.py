"""`python -m bench perplexity`: what a precision or a quantisation does to a model's predictions, on one text.

The text is the language reference that every Python carries along (pydoc_data.topics), so that anyone can repeat it.
It is cut into windows of equal length; perplexity = exp(mean over all predicted tokens of −log p(token | those before
it in its window)), Jelinek et al. 1977. Runs in this process, with the worker's own model and attention.
JSON: {schema, started_at, machine, text: {source, tokens, window}, variants: name -> {perplexity, ratio}}; `ratio` is
to the first variant.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import describe_machine

VARIANTS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
}
"""name -> (dtype, quantization)."""


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("perplexity", help="what a precision does to the predictions", description=__doc__)
    add = parser.add_argument
    add("--model", help="as launch.py takes it (default: the default model)")
    add("--variant", action="append", choices=sorted(VARIANTS), help="(default: all; the first is the baseline)")
    add("--tokens", type=int, help="how much of the text (16384; quick: 512)")
    add("--window", type=int, default=512, help="tokens of context at most (%(default)s)")
    add("--quick", action="store_true", help="under 45 s")
    add(
        "--json", type=Path, metavar="FILE", help="write {schema, machine, text, variants: name -> {perplexity, ratio}}"
    )
    parser.set_defaults(run=run)


def text() -> str:
    """The topics in the order of their names."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def perplexity(folder: Path, token_ids: list[int], window: int, dtype: str, quantization: str) -> float:
    """Of the model in `folder`; the first token of each window is given, not predicted."""
    import torch

    from kernels.metadata import AttentionMetadata
    from kernels.selector import select_backend
    from protocol.model_config import ModelConfig
    from worker.models import build_model
    from worker.weights import open_weights

    config, block_size, kind = ModelConfig.from_folder(folder), 16, getattr(torch, dtype)
    selection = select_backend(
        "auto",
        device="cpu",
        dtype=kind,
        head_dim=config.head_dim,
        block_size=block_size,
        window=max(config.windows) or None,
        num_threads=torch.get_num_threads(),
    )
    model = build_model(config, open_weights(folder), kind, "cpu", max_positions=window, quantization=quantization)
    num_blocks = -(-window // block_size) + 1
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    caches = [(torch.zeros(shape, dtype=kind), torch.zeros(shape, dtype=kind)) for _ in range(config.num_layers)]
    total, predicted = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(token_ids) - 1, window):
            ids = token_ids[start : start + window]
            if len(ids) < 2:
                break
            metadata = AttentionMetadata.build([len(ids)], [len(ids)], [list(range(1, num_blocks))], block_size, "cpu")
            inputs = torch.tensor(ids)
            hidden = model.forward(
                inputs, torch.arange(len(ids)), caches, [metadata] * config.num_layers, selection.backend
            )
            logprobs = torch.log_softmax(model.compute_logits(hidden[:-1].contiguous()).double(), dim=-1)
            total -= float(logprobs.gather(1, inputs[1:, None]).sum())
            predicted += len(ids) - 1
    return math.exp(total / predicted)


def run(args: argparse.Namespace) -> int:
    from client.tokenizer import Tokenizer
    from worker.model_store import ModelStoreError, resolve

    console = Console()
    count = args.tokens or (512 if args.quick else 16384)
    if count < 2 or args.window < 2:
        console.print("[red]--tokens and --window must be at least 2[/]")
        return 2
    try:
        folder = resolve(args.model)
    except ModelStoreError as error:
        console.print(f"[red]{error}[/]", highlight=False, soft_wrap=True)
        return 1
    token_ids = Tokenizer(folder).encode(text()[: count * 16], add_special_tokens=False)[:count]
    names = args.variant or list(VARIANTS)
    found: dict[str, float] = {}
    with console.status("") as status:
        for name in names:
            status.update(f"{name}: {len(token_ids)} tokens")
            found[name] = perplexity(folder, token_ids, args.window, *VARIANTS[name])
    table = Table(title=f"{folder.name}, {len(token_ids)} tokens of pydoc_data.topics, windows of {args.window}")
    for heading in ("variant", "perplexity", f"÷ {names[0]}"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, value in found.items():
        table.add_row(name, f"{value:.4f}", f"{value / found[names[0]]:.4f}")
    console.print(table)
    if args.json:
        result: dict[str, Any] = {
            "schema": 1,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "text": {"source": "pydoc_data.topics", "tokens": len(token_ids), "window": args.window},
            "variants": {n: {"perplexity": v, "ratio": v / found[names[0]]} for n, v in found.items()},
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0
