"""What Prometheus sees. Names after vLLM's, with the prefix `pageplane:`; label `engine` is the replica's number.

Two sources. The scheduler counts what happens to requests and steps, of all its clients, since it started; here that is
only written out, so a gateway that is restarted loses none of it. Names with `http_` are this gateway's own view of
what it served, since it started: with tokenising, waiting for the client and all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from protocol.histograms import BOUNDS, FIRST_TOKEN_S, INTER_TOKEN_S, REQUEST_S, STAGE_S
from protocol.messages import HistogramData, MetricsSnapshot, ReplicaMetrics, ReplicaStatus

disable_created_metrics()
PREFIX = "pageplane:"


class Engine(NamedTuple):
    """What the scheduler tells of one replica."""

    status: ReplicaStatus
    metrics: ReplicaMetrics


class Shown(NamedTuple):
    """A number of each replica. `name` without prefix; counters are shown with `_total` behind it."""

    name: str
    text: str
    value: Callable[[Engine], float]


def _usage(engine: Engine) -> float:
    total = engine.status.total_blocks
    return (total - engine.status.free_blocks) / total if total else 0.0


GAUGES = (
    Shown("num_requests_running", "Requests in the batch", lambda engine: engine.status.running),
    Shown("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", _usage),
    Shown("kv_cache_blocks", "KV blocks there are, without the null block", lambda engine: engine.status.total_blocks),
    Shown("kv_cache_cached_blocks", "KV blocks a prefix can hit", lambda engine: engine.status.cached_blocks),
    Shown("replica_up", "1 if a worker serves the replica", lambda engine: engine.status.state == "ready"),
    Shown("replica_epoch", "Times the replica lost its worker", lambda engine: engine.status.epoch),
    Shown("decode_step_seconds", "Learned time of a step that only decodes", lambda e: e.metrics.decode_step_s),
    Shown("prefill_token_seconds", "Learned time that a prompt token adds", lambda e: e.metrics.prefill_token_s),
    Shown("prefill_budget_tokens", "Prompt tokens the next step would take", lambda e: e.metrics.prefill_budget),
)
COUNTERS = (
    Shown("prompt_tokens", "Prompt tokens of requests come to their first token", lambda e: e.metrics.prompt_tokens),
    Shown("generation_tokens", "Tokens generated", lambda engine: engine.status.generated_tokens),
    Shown("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda e: e.status.prefix_queries),
    Shown("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda engine: engine.status.prefix_hits),
    Shown("num_preemptions", "Requests that had to give up their blocks", lambda engine: engine.status.preemptions),
    Shown("engine_steps", "Steps planned", lambda engine: engine.status.steps),
    Shown("recoveries", "Workers lost, whose requests went on", lambda engine: engine.status.recoveries),
    Shown("rested_seconds", "Waited for the sake of another replica's prompt", lambda e: e.metrics.rested_s),
    Shown("work_items", "Pieces of layers and attention computed on the CPU", lambda e: e.metrics.work_items),
    Shown("borrowed_items", "Those computed on cores of idle workers", lambda e: e.metrics.borrowed_items),
    Shown("fenced_messages", "Messages of lost workers, dropped", lambda engine: engine.status.fenced_messages),
)
HISTOGRAM_TEXTS = {
    "time_to_first_token_seconds": "From a request's acceptance by the scheduler to its first token",
    "inter_token_latency_seconds": "Between two tokens of a request",
    "e2e_request_latency_seconds": "From acceptance to the last token, of requests neither aborted nor failed",
    "request_queue_time_seconds": "From acceptance until the request first ran",
    "request_prefill_time_seconds": "From when the request first ran to its first token",
    "request_decode_time_seconds": "From the first token to the last",
    "request_prompt_tokens": "Prompt tokens of ended requests",
    "request_generation_tokens": "Tokens generated for ended requests",
    "iteration_tokens": "Tokens computed in a step",
    "plan_bytes": "Size of the message that tells a worker its step",
}
"""By the names of `protocol.histograms.BOUNDS`."""
STAGE_HISTOGRAM = "step_stage_seconds"


class Metrics:
    """Counters and histograms of one gateway. Cheap to observe; the text is made when asked for."""

    def __init__(self, model_name: str):
        self._model = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._snapshot: MetricsSnapshot | None = None
        labels = ["model_name"]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self._registry)
            return made.labels(model_name)

        self.time_to_first_token = histogram(
            "http_time_to_first_token_seconds",
            "From a choice's start in this gateway to its first token",
            FIRST_TOKEN_S,
        )
        self.inter_token_latency = histogram(
            "http_inter_token_latency_seconds",
            "Between two tokens of a choice, as this gateway got them",
            INTER_TOKEN_S,
        )
        self.e2e_latency = histogram(
            "http_e2e_latency_seconds", "From a choice's start in this gateway to its last token", REQUEST_S
        )
        self.prompt_tokens = Counter(
            f"{PREFIX}http_prompt_tokens",
            "Prompt tokens of finished HTTP requests, each prompt once",
            labels,
            registry=self._registry,
        ).labels(model_name)
        self.finished = Counter(
            f"{PREFIX}http_choices",
            "Choices this gateway gave, by the way they ended",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self.finished.labels(model_name, reason)  # a series that begins at its first event hides that event

    def finish(self, reason: str) -> None:
        """A choice ended: stop, length, abort or error."""
        self.finished.labels(self._model, reason).inc()

    def text(self, snapshot: MetricsSnapshot | None) -> bytes:
        """Prometheus' text format. snapshot: None when the scheduler does not answer."""
        self._snapshot = snapshot
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The scheduler's part, asked for by the registry."""
        snapshot = self._snapshot
        up = GaugeMetricFamily(f"{PREFIX}scheduler_up", "1 if the scheduler answers", labels=["model_name"])
        up.add_metric([self._model], float(snapshot is not None))
        yield up
        if snapshot is None:
            return
        yield from self._whole(snapshot)
        engines = [Engine(*pair) for pair in zip(snapshot.status.replicas, snapshot.replicas, strict=True)]
        labels = ["model_name", "engine"]
        for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for shown in table:
                family = kind(PREFIX + shown.name, shown.text, labels=labels)
                for engine in engines:
                    family.add_metric([self._model, str(engine.status.replica)], float(shown.value(engine)))
                yield family
        for name, bounds in BOUNDS.items():
            histogram = HistogramMetricFamily(PREFIX + name, HISTOGRAM_TEXTS[name], labels=labels)
            for engine in engines:
                who = [self._model, str(engine.status.replica)]
                _add(histogram, who, bounds, engine.metrics.histograms[name])
            yield histogram
        stages = HistogramMetricFamily(
            PREFIX + STAGE_HISTOGRAM, "What a step spends in each stage", labels=[*labels, "stage"]
        )
        for engine in engines:
            for stage, data in engine.metrics.stages.items():
                _add(stages, [self._model, str(engine.status.replica), stage], STAGE_S, data)
        yield stages

    def _whole(self, snapshot: MetricsSnapshot) -> Iterable[Metric]:
        """What belongs to no replica."""
        waiting = GaugeMetricFamily(f"{PREFIX}num_requests_waiting", "Requests in the queue", labels=["model_name"])
        waiting.add_metric([self._model], snapshot.status.waiting)
        yield waiting
        dropped = CounterMetricFamily(
            f"{PREFIX}dropped_frames", "Frames on any socket that were no valid message", labels=["model_name"]
        )
        dropped.add_metric([self._model], snapshot.status.dropped_frames)
        yield dropped
        success = CounterMetricFamily(
            f"{PREFIX}request_success", "Requests that are over", labels=["model_name", "finished_reason"]
        )
        for reason, count in sorted(snapshot.finished.items()):
            success.add_metric([self._model, reason], count)
        yield success


def _add(family: HistogramMetricFamily, labels: list[str], bounds: tuple[float, ...], data: HistogramData) -> None:
    names = [*map(floatToGoString, bounds), "+Inf"]
    cumulative = map(float, accumulate(data.counts))
    family.add_metric(labels, list(zip(names, cumulative, strict=True)), data.sum)


class RequestClock:
    """Observes one choice's latencies, from its making on."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._began = time.monotonic()
        self._last: float | None = None
        self._over = False

    def tokens(self, count: int) -> None:
        """`count` (at least 1) tokens arrived together."""
        now = time.monotonic()
        if self._last is None:
            self._metrics.time_to_first_token.observe(now - self._began)
        else:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - self._last) / count)
        self._last = now

    def finished(self, reason: str, prompt_tokens: int) -> None:
        """It ended. prompt_tokens: 0 for all but the first choice of a prompt. Only the first call counts."""
        if self._over:
            return
        self._over = True
        self._metrics.finish(reason)
        if reason != "error":
            self._metrics.e2e_latency.observe(time.monotonic() - self._began)
            self._metrics.prompt_tokens.inc(prompt_tokens)
