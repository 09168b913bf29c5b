"""Requests that cannot be served: each is refused by the field at fault, and a good one right behind it is served."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from client.errors import RequestRejected
from protocol import messages as m
from tests.chaos.conftest import MAX_MODEL_LEN
from tests.chaos.raw import Peer, submit
from tests.integration.deployment import Deployment
from tests.tiny_model import VOCAB_SIZE

NAN, INF = float("nan"), float("inf")
numbers = itertools.count()


@pytest.fixture(scope="module")
def peer(two_workers: Deployment) -> Iterator[Peer]:
    with Peer(two_workers.endpoints["client"]) as peer:
        yield peer


def serves(peer: Peer) -> None:
    """A good request is accepted and answered in full."""
    name = f"good-{next(numbers)}"
    peer.send(submit(name, [1, 2, 3]))
    accepted, *_, finished = peer.receive_until(lambda message: isinstance(message, m.Finished))
    assert (accepted.request_id, accepted.prompt_tokens) == (name, 3)
    assert (finished.reason, finished.usage.completion_tokens) == ("length", 2)


BAD_SAMPLING: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (0, -1, -(2**63))),
    *(("temperature", value) for value in (-0.1, -INF, NAN, INF)),
    *(("top_k", value) for value in (-2, -5, -(2**63))),
    *(("top_p", value) for value in (0.0, -1.0, 1.5, 2.0, NAN, INF)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, INF)),
    *(("seed", value) for value in (-1, -(2**63))),
    *(("min_tokens", value) for value in (-1, 3)),
    *(("stop_token_ids", value) for value in ((-1,), (VOCAB_SIZE,), (2**40,), (0,) * 65)),
]


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING)
def test_bad_sampling_parameter_is_refused_by_name(server: Deployment, peer: Peer, name: str, value: Any) -> None:
    request_id = f"bad-{next(numbers)}"
    peer.send(submit(request_id, **{name: value}))
    rejected = peer.receive()
    assert (rejected.request_id, rejected.code, rejected.param) == (request_id, "invalid_request", name)
    assert name in rejected.message and "got" in rejected.message
    serves(peer)


BAD_PROMPTS: list[tuple[list[int] | bytes, str, str]] = [
    ([], "invalid_request", "the prompt is empty"),
    ([-1], "invalid_request", f"token id -1 is outside the vocabulary of {VOCAB_SIZE}"),
    ([5, -(2**31)], "invalid_request", "token id -2147483648 is outside"),
    ([VOCAB_SIZE], "invalid_request", f"token id {VOCAB_SIZE} is outside"),
    ([1, 2, 2**31 - 1], "invalid_request", "token id 2147483647 is outside"),
    (b"\1\2\3", "invalid_request", "3 bytes are no int32 array"),
    ([1] * MAX_MODEL_LEN, "too_long", f"at most {MAX_MODEL_LEN - 1} fit in the model's length of {MAX_MODEL_LEN}"),
    ([1] * 1_000_000, "too_long", "the prompt has 1000000 tokens"),
]


@pytest.mark.parametrize(("tokens", "code", "says"), BAD_PROMPTS, ids=[says for _, _, says in BAD_PROMPTS])
def test_bad_prompt_is_refused_for_what_is_wrong_with_it(
    server: Deployment, peer: Peer, tokens: list[int] | bytes, code: str, says: str
) -> None:
    peer.send(submit("bad", tokens))
    rejected = peer.receive()
    assert (rejected.request_id, rejected.code, rejected.param) == ("bad", code, "token_ids")
    assert says in rejected.message
    serves(peer)


@pytest.mark.parametrize("request_id", ["", "x" * 257, "é" * 300])
def test_bad_request_id_is_refused(server: Deployment, peer: Peer, request_id: str) -> None:
    peer.send(submit(request_id))
    rejected = peer.receive()
    assert (rejected.code, rejected.param) == ("invalid_request", "request_id")
    serves(peer)


@pytest.mark.parametrize(
    "message", [m.Abort("nobody"), m.Attach("nobody", 0), m.Attach("", 0)], ids=["abort", "attach", "attach nothing"]
)
def test_unknown_request_is_said_to_be_unknown(server: Deployment, peer: Peer, message: m.Abort | m.Attach) -> None:
    peer.send(message)
    rejected = peer.receive()
    assert (rejected.request_id, rejected.code, rejected.param) == (
        message.request_id,
        "unknown_request",
        "request_id",
    )
    serves(peer)


def test_second_request_of_a_running_ones_name_is_refused_and_the_first_unharmed(
    server: Deployment, peer: Peer
) -> None:
    peer.send(submit("twin", max_tokens=50), submit("twin", max_tokens=50))
    messages = peer.receive_until(lambda message: isinstance(message, m.Finished))
    (rejected,) = (message for message in messages if isinstance(message, m.Rejected))
    assert (rejected.request_id, rejected.code, rejected.param) == ("twin", "duplicate_request", "request_id")
    assert messages[-1].usage.completion_tokens == 50
    serves(peer)


@pytest.mark.parametrize("next_index", [-1, 6, 2**40])
def test_attach_beyond_the_output_is_refused(server: Deployment, peer: Peer, next_index: int) -> None:
    name = f"done-{next_index}"
    peer.send(submit(name, max_tokens=5))
    peer.receive_until(lambda message: isinstance(message, m.Finished))
    peer.send(m.Attach(name, next_index))
    rejected = peer.receive()
    assert (rejected.code, rejected.param) == ("invalid_request", "next_index")
    peer.send(m.Attach(name, 5))
    assert [type(peer.receive()) for _ in range(2)] == [m.Accepted, m.Finished]


EXTREME: list[dict[str, Any]] = [
    {"top_k": 2**31},
    {"top_k": 2**63},
    {"top_k": 2**64 - 1},
    {"top_k": -1},
    {"seed": 2**64 - 1},
    {"seed": 0},
    {"temperature": 1e-12},
    {"temperature": 1e38},
    {"temperature": 1e300},
    {"top_p": 1e-300},
    {"min_p": 1.0},
    {"min_p": 5e-324},
    {"max_tokens": 2**64 - 1, "min_tokens": 2**64 - 1, "ignore_eos": False},
    {"max_tokens": 2**31, "min_tokens": 2**31},
    {"stop_token_ids": tuple(range(64)), "min_tokens": 2},
]


@pytest.mark.parametrize("sampling", EXTREME, ids=str)
def test_extreme_parameter_within_the_rules_is_served(server: Deployment, peer: Peer, sampling: dict[str, Any]) -> None:
    """No worker and no scheduler dies of it: all processes are the same afterwards."""
    pids = server.pids
    name = f"extreme-{next(numbers)}"
    peer.send(submit(name, [1] * (MAX_MODEL_LEN - 4), **sampling))
    finished = peer.receive_until(lambda message: isinstance(message, m.Finished))[-1]
    assert (finished.reason, finished.usage.completion_tokens) == ("length", min(sampling.get("max_tokens", 2), 4))
    assert server.pids == pids
    serves(peer)


@pytest.mark.parametrize("priority", [-(2**63), 2**64 - 1])
def test_extreme_priority_is_served(server: Deployment, peer: Peer, priority: int) -> None:
    request = submit(f"priority-{priority}")
    peer.send(m.Submit(request.request_id, request.token_ids, request.sampling, priority, "salt" * 1000))
    assert peer.receive_until(lambda message: isinstance(message, m.Finished))[-1].reason == "length"
    serves(peer)


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (m.SamplingParams(max_tokens="many"), "max_tokens"),  # type: ignore[arg-type]
        (m.SamplingParams(seed=2**64), "sampling parameters: "),
        (m.SamplingParams(temperature=None), "temperature"),  # type: ignore[arg-type]
        (m.SamplingParams(stop_token_ids=("x",)), "stop_token_ids"),  # type: ignore[arg-type]
    ],
)
def test_client_library_names_what_cannot_be_sent(server: Deployment, sampling: m.SamplingParams, says: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        server.client.complete([1, 2], sampling, detokenize=False)
    assert caught.value.code == "invalid_request" and says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert server.client.complete([1, 2], m.SamplingParams(max_tokens=1), detokenize=False).usage.completion_tokens == 1


def test_prompt_longer_than_the_whole_pool_is_refused_with_the_pools_size(
    tmp_path_factory: Any, tiny_folder: Any
) -> None:
    """And a request behind it is served; one that outgrows the pool ends with a reason that says so."""
    flags = ("--model", str(tiny_folder), "--workers", "1", "--dtype", "float32", "--kv-memory", "72KiB")
    with Deployment(tmp_path_factory.mktemp("pool"), *flags) as server, Peer(server.endpoints["client"]) as peer:
        blocks = server.status().replicas[0].total_blocks
        assert 4 <= blocks <= 20
        peer.send(submit("long", [1] * (16 * blocks + 1)), submit("short", [1, 2, 3]))
        rejected, accepted = peer.receive(), peer.receive()
        assert (rejected.request_id, rejected.code, rejected.param) == ("long", "too_long", "token_ids")
        assert f"{blocks} blocks of 16 tokens" in rejected.message
        assert accepted.request_id == "short"
        peer.receive_until(lambda message: isinstance(message, m.Finished))
        peer.send(submit("grows", [1] * 16, max_tokens=16 * blocks))
        finished = peer.receive_until(lambda message: isinstance(message, m.Finished))[-1]
        assert finished.reason == "kv_capacity"
        assert finished.usage.completion_tokens == 16 * (blocks - 1) + 1  # the last token needs no slot
        serves(peer)
        server.wait_idle()
