"""docs/observability.md and docs/grafana.json name the metrics that the gateway exposes, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import Metric

from gateway.metrics import Metrics
from gateway.routes.debug import REASONS
from protocol.config import EngineConfig
from protocol.histograms import STAGES
from protocol.messages import MetricsSnapshot
from protocol.model_config import ModelConfig
from scheduler.engine import Engine
from scheduler.eviction_memory import REMEMBERED
from tests.gateway.exposition import families
from tests.tiny_model import tiny_model

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "observability.md").read_text()
ROW = re.compile(r"^\| `(pageplane:\w+)` \| (\w+) \|([\w, ]*)\|", re.M)


def snapshot() -> MetricsSnapshot:
    """Of a scheduler that has served nothing."""
    engine = Engine(EngineConfig(model=str(tiny_model())), ModelConfig.from_folder(tiny_model()), hash_key=b"k")
    return engine.metrics(0.0)


def exposed() -> dict[str, Metric]:
    return families(Metrics("tiny").text(snapshot()).decode())


def labels(family: Metric) -> list[str]:
    names = {name for sample in family.samples for name in sample.labels} - {"model_name", "le"}
    return sorted(names)


def documented_name(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def test_the_table_lists_every_metric_with_its_type_and_labels() -> None:
    table = {name: (kind, sorted(filter(None, names.strip().split(", ")))) for name, kind, names in ROW.findall(TEXT)}
    assert table == {documented_name(family): (family.type, labels(family)) for family in exposed().values()}


def test_every_stage_of_a_step_is_explained() -> None:
    section = TEXT.partition("### The stages of a step")[2].partition("\n#")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.M)) == STAGES


def queries() -> dict[str, str]:
    """Every query of the dashboard, by the panel or variable that asks it."""
    board = json.loads((DOCS / "grafana.json").read_text())
    found = {
        f"{panel['title']}/{target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", [])
    }
    return found | {v["name"]: v["definition"] for v in board["templating"]["list"] if v["type"] == "query"}


def test_every_query_of_the_dashboard_names_series_and_labels_that_exist() -> None:
    names: dict[str, set[str]] = {}
    for family in exposed().values():
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
        if family.type == "histogram":  # labelled series of which none exists yet have no samples
            assert {f"{family.name}_bucket", f"{family.name}_sum", f"{family.name}_count"} <= names.keys()
    used = set()
    for asker, query in queries().items():
        selectors = re.findall(r"(pageplane:\w+)(?:\{([^}]*)\})?", query)
        assert selectors, f"{asker} asks for nothing of ours"
        for name, matchers in selectors:
            assert name in names, f"{asker}: {name} does not exist"
            assert set(re.findall(r"(\w+)=~?", matchers)) <= names[name], f"{asker}: {name} lacks a label"
            used.add(name)
        grouping = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        assert grouping <= {label for name, _ in selectors for label in names[name]}, asker
        assert query.count("(") == query.count(")"), asker
    assert len(used) > 30


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    board = json.loads((DOCS / "grafana.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in board["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24 and (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]


def test_every_reason_of_a_missing_block_is_explained() -> None:
    section = TEXT.partition("## Why did my prefix (not) hit?")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == set(REASONS)
    assert f"{REMEMBERED:,} evicted" in section
