"""What happened in a run of histories, so that a test can tell whether they visit the places they are meant for."""

from __future__ import annotations

from collections import Counter

from tests.sim.cluster import Cluster, play


def run_shard(first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Play `count` histories from seed `first` on: how often each thing happened, and a line for each that failed."""
    census: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        try:
            census += observe(play(seed))
        except Exception as error:
            failures.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
    return census, failures


def observe(cluster: Cluster) -> Counter[str]:
    """Events of one finished history."""
    census: Counter[str] = Counter()
    for replica in cluster.engine.replicas:
        stats = replica.stats
        census["steps"] += stats.steps
        census["preemptions"] += stats.preemptions
        census["recoveries"] += stats.recoveries
        census["prefix hits"] += stats.prefix_hits
        census["messages fenced"] += stats.fenced_messages
    census["workers that refused a plan"] = sum(process.refusing for process in cluster.processes.values())
    for client in cluster.clients:
        census["clients that left"] += client.gone
        for stream in client.streams.values():
            census["streams moved"] += stream.moved
            census["requests rejected"] += stream.rejected is not None
            if stream.finished is not None:
                census[f"finished: {stream.finished.reason}"] += 1
    return census
