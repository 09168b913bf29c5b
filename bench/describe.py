"""A load in a line of words, from the JSON form of its result. Pure."""

from __future__ import annotations

from typing import Any


def describe(result: dict[str, Any]) -> str:
    """For titles: what was asked, and how many at a time."""
    load, concurrency = result["workload"], result["concurrency"]
    shared = f"{load['prefix_len']} shared by {load['num_prefixes']} + " if load["prefix_len"] else ""
    if load.get("kind") == "long-arrivals":
        return (
            f"{load['num_prompts']} prompts of {load['long_input_len']:,} tokens, one after another, "
            f"beside {concurrency} streams ({shared}{load['input_len']} in, {load['output_len']} out)"
        )
    return (
        f"{load['num_prompts']} requests, {shared}{load['input_len']} tokens in, {load['output_len']} out, "
        f"{concurrency} at a time"
    )
