"""Flags that several commands share."""

from __future__ import annotations

import argparse
from typing import Any

from protocol.messages import SamplingParams


def parser(name: str, description: str, **settings: Any) -> argparse.ArgumentParser:
    """An argument parser that knows --endpoint."""
    command = argparse.ArgumentParser(
        prog=f"python -m client{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **settings,
    )
    command.add_argument(
        "--endpoint", metavar="URL", help="address of the server (default: the one started last on this machine)"
    )
    return command


def add_sampling(command: argparse.ArgumentParser) -> None:
    """How tokens are chosen and when the answer ends."""
    group = command.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens (default: all)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest that sum to P")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="only those of P times the top probability"
    )
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="of tokens the answer has")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="each time it has the token")
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="of tokens of prompt and answer (default: 1)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens (default: random)")
    group.add_argument(
        "--stop-token", type=int, action="append", default=[], metavar="ID", help="end at this token id; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end of text")


def sampling_of(options: argparse.Namespace) -> SamplingParams:
    """The parameters that `add_sampling` read."""
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop_token_ids=tuple(options.stop_token),
        ignore_eos=options.ignore_eos,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
    )
