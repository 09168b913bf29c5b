"""Prometheus' text format, read by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def families(text: str) -> dict[str, Metric]:
    """By name as the parser has it (counters without `_total`); fails if a name comes twice."""
    found: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text):
        assert family.name not in found, f"{family.name} comes twice"
        found[family.name] = family
    return found


def total(families: dict[str, Metric], sample_name: str, **labels: str) -> float:
    """The sum of all samples of that full name with these labels; fails if there is none."""
    values = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == f"pageplane:{sample_name}" and labels.items() <= sample.labels.items()
    ]
    assert values, f"no sample {sample_name} with {labels}"
    return sum(values)
