"""What Prometheus sees. Names after vLLM's, with the prefix `pageplane:`; label `engine` is the replica's number.

Two sources, told apart in the help texts: the scheduler's status (all clients, since the scheduler started) and what
this gateway saw of its own requests (since it started).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protocol.messages import Status

disable_created_metrics()
PREFIX = "pageplane:"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
_LONG_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0)


class Metrics:
    """Counters and histograms of one gateway. Cheap to observe; the text is made when asked for."""

    def __init__(self, model_name: str):
        self._model = model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._status: Status | None = None
        labels = ["model_name"]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, f"{text} (this gateway)", labels, buckets=buckets, registry=self._registry)
            return made.labels(model_name)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _TTFT_S
        )
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between two tokens of a request", _SHORT_S)
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token", _LONG_S
        )
        self.prompt_tokens = Counter(
            f"{PREFIX}prompt_tokens",
            "Prompt tokens of finished requests (this gateway)",
            labels,
            registry=self._registry,
        ).labels(model_name)
        self.finished = Counter(
            f"{PREFIX}request_success",
            "Requests by the way they ended (this gateway)",
            [*labels, "finished_reason"],
            registry=self._registry,
        )

    def finish(self, reason: str) -> None:
        """A choice ended: stop, length, abort or error."""
        self.finished.labels(self._model, reason).inc()

    def text(self, status: Status | None) -> bytes:
        """Prometheus' text format. status: None when the scheduler does not answer."""
        self._status = status
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The scheduler's part, asked for by the registry."""
        status = self._status
        up = GaugeMetricFamily(f"{PREFIX}scheduler_up", "1 if the scheduler answers", labels=["model_name"])
        up.add_metric([self._model], float(status is not None))
        yield up
        if status is None:
            return
        whole: list[tuple[type[Metric], str, str, float]] = [
            (GaugeMetricFamily, "num_requests_waiting", "Requests in the queue", status.waiting),
            (
                CounterMetricFamily,
                "dropped_frames",
                "Frames on any socket that were no valid message",
                status.dropped_frames,
            ),
        ]
        for kind, name, text, value in whole:
            family = kind(PREFIX + name, text, labels=["model_name"])  # type: ignore[call-arg]
            family.add_metric([self._model], value)  # type: ignore[attr-defined]
            yield family
        columns = (
            (GaugeMetricFamily, "num_requests_running", "Requests in the batch", "running"),
            (GaugeMetricFamily, "replica_epoch", "Times the replica lost its worker", "epoch"),
            (
                CounterMetricFamily,
                "prefix_cache_queries",
                "Prompt tokens looked up for a prefix",
                "prefix_queries",
            ),
            (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found cached", "prefix_hits"),
            (CounterMetricFamily, "num_preemptions", "Requests that had to give up their blocks", "preemptions"),
            (CounterMetricFamily, "generation_tokens", "Tokens generated", "generated_tokens"),
            (CounterMetricFamily, "engine_steps", "Steps planned", "steps"),
            (CounterMetricFamily, "recoveries", "Times requests outlived their worker", "recoveries"),
            (CounterMetricFamily, "fenced_messages", "Messages of dead workers that were dropped", "fenced_messages"),
        )
        for family_of, name, text, field in columns:
            family = family_of(PREFIX + name, text, labels=["model_name", "engine"])
            for replica in status.replicas:
                family.add_metric([self._model, str(replica.replica)], getattr(replica, field))
            yield family
        ready = GaugeMetricFamily(f"{PREFIX}replica_up", "1 if a worker serves it", labels=["model_name", "engine"])
        usage = GaugeMetricFamily(
            f"{PREFIX}kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", labels=["model_name", "engine"]
        )
        for replica in status.replicas:
            who = [self._model, str(replica.replica)]
            ready.add_metric(who, float(replica.state == "ready"))
            total = replica.total_blocks
            usage.add_metric(who, (total - replica.free_blocks) / total if total else 0.0)
        yield ready
        yield usage


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
