"""A load in a line of words, from the JSON form of its result. Pure."""

from __future__ import annotations

from typing import Any


def describe(result: dict[str, Any]) -> str:
    """For titles: what was asked, and how it came."""
    return f"{_what(result['workload'], result['concurrency'])}{_how(result)}"


def describe_slo(slo: dict[str, float | None]) -> str:
    """The limits in ms, as `--slo` names them."""
    names = {"ttft_s": "TTFT", "itl_p99_s": "ITL p99", "tpot_s": "mean ITL", "e2e_s": "end to end"}
    return ", ".join(f"{names[key]} ≤ {limit * 1e3:g} ms" for key, limit in slo.items() if limit is not None)


def _what(load: dict[str, Any], concurrency: int | None) -> str:
    kind = load.get("kind", "random")
    if kind == "trace":
        return (
            f"{load['num_prompts']:,} requests of {load['trace']} over {load['span_s']:.0f} s, on average "
            f"{load['mean_input_len']:,.0f} tokens in, {load['mean_output_len']:,.0f} out"
        )
    shared = f"{load['prefix_len']} shared by {load['num_prefixes']} + " if load["prefix_len"] else ""
    if kind == "long-arrivals":
        return (
            f"{load['num_prompts']} prompts of {load['long_input_len']:,} tokens, one after another, "
            f"beside {concurrency} streams ({shared}{load['input_len']} in, {load['output_len']:,} out)"
        )
    if kind == "multi-turn":
        return (
            f"{load['num_prompts']} conversations of {load['turns']} turns, {shared}{load['input_len']} tokens in, "
            f"then {load['turn_len']} more for each turn, {load['output_len']} out"
        )
    return f"{load['num_prompts']} requests, {shared}{load['input_len']} tokens in, {load['output_len']} out"


def _how(result: dict[str, Any]) -> str:
    arrivals = result.get("arrivals", {"process": "closed"})
    concurrency = result["concurrency"]
    if arrivals["process"] == "closed":
        return f", {concurrency} at a time"
    if arrivals["process"] == "sequential":
        return ""
    limit = "" if concurrency is None else f", at most {concurrency} at a time"
    if arrivals["process"] == "trace":
        return limit
    bursts = "" if arrivals["burstiness"] == 1 else f" (burstiness {arrivals['burstiness']:g})"
    return f", {arrivals['request_rate']:g} arriving each second{bursts}{limit}"
