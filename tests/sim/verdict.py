"""What must be true when a history is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.windows import first_live_block, most_live_blocks
from tests.sim.client import Stream
from tests.sim.golden import golden_stream
from tests.sim.scenario import Scenario

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster


def judge(cluster: Cluster) -> None:
    """Raise AssertionError unless every stream is the golden one and nothing is left behind anywhere."""
    for client in cluster.clients:
        for stream in client.streams.values():
            try:
                _judge_stream(cluster.scenario, stream, abandoned=client.gone)
            except AssertionError as error:
                error.add_note(f"request {stream.planned}")
                raise
    engine = cluster.engine
    assert not engine.requests and not len(engine.queue), "requests are left in the scheduler"
    assert not engine.connections._by_identity, "connections without requests are kept"
    for replica in engine.replicas:
        pool = replica.manager.pool
        assert pool.num_free == len(pool.blocks) - 1, f"replica {replica.index}: blocks are lost"
        assert not replica.loose and not replica.rows.num_active, f"replica {replica.index}: rows or tokens are left"
    engine.check()


def _judge_stream(scenario: Scenario, stream: Stream, abandoned: bool) -> None:
    planned = stream.planned
    golden = golden_stream(
        planned.prompt,
        planned.sampling,
        eos_token_ids=scenario.model.eos_token_ids,
        max_model_len=scenario.config.max_model_len,
        vocab_size=scenario.model.vocab_size,
        nan_per_1000=scenario.nan_per_1000,
    )
    assert stream.tokens == golden.tokens[: len(stream.tokens)], f"{stream.tokens} instead of {golden.tokens}"
    if abandoned:
        return
    if stream.rejected is not None:
        assert stream.rejected.code == "too_long" and stream.rejected.param == "token_ids", stream.rejected
        assert not _fits(scenario, len(planned.prompt), min(scenario.num_blocks)), stream.rejected
        return
    finished = stream.finished
    assert finished is not None, "the stream never ended"
    usage = finished.usage
    assert usage.prompt_tokens == len(planned.prompt)
    assert usage.completion_tokens == len(stream.tokens)
    size = scenario.config.block_size
    most = (len(planned.prompt) - 1) // size * size if scenario.config.enable_prefix_caching else 0
    assert usage.cached_tokens <= most and usage.cached_tokens % size == 0, usage
    if finished.reason == "abort":
        assert stream.aborted
        return
    if finished.reason == "kv_capacity":
        length = len(planned.prompt) + len(stream.tokens)
        assert not _fits(scenario, length, max(scenario.num_blocks)), (
            f"{length} tokens fit, yet it ended for lack of KV"
        )
        assert len(stream.tokens) < len(golden.tokens) or golden.reason == "error"
        return
    assert finished.reason == golden.reason, f"{finished} instead of {golden.reason}"
    assert stream.tokens == golden.tokens
    if stream.tokens:
        _judge_capacity(scenario, len(planned.prompt), len(planned.prompt) + len(stream.tokens) - 1)


def _fits(scenario: Scenario, num_tokens: int, num_blocks: int) -> bool:
    size = scenario.config.block_size
    need = sum(most_live_blocks(num_tokens, window, size) for window in scenario.windows)
    return need <= num_blocks - 1


def _judge_capacity(scenario: Scenario, prompt_len: int, computed: int) -> None:
    """No stream was computed further than its live blocks fit into the largest pool."""
    size, usable = scenario.config.block_size, max(scenario.num_blocks) - 1
    for length in range(prompt_len, computed + 1):
        live = sum(
            -(-length // size) - (first_live_block(length - 1, window, size) if window else 0)
            for window in scenario.windows
        )
        assert live <= usable, f"{length} tokens were computed with {usable} blocks, {live} are needed"
