"""The asyncio client against a scripted server over real sockets."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from scripted_server import STATUS, ScriptedServer

from client import (
    AsyncClient,
    BrokenStream,
    ClientError,
    Completion,
    GenerationFailed,
    PromptError,
    RequestLost,
    RequestRejected,
    SamplingParams,
    ServerUnavailable,
)
from protocol import arrays, runtime
from protocol import messages as m

LONG = SamplingParams(max_tokens=1000)
IDS = [104, 105]


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; none may take longer than this."""
    asyncio.run(asyncio.wait_for(work, 30))


def hold(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
    """Accept, send one token, and leave it at that."""
    if not isinstance(message, m.Submit):
        return False
    server.accept(identity, message)
    server.tokens(message.request_id, 0, [ord("x")])
    return True


def test_answer_comes_in_order_with_text_reason_and_usage(server: ScriptedServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            chunks = [chunk async for chunk in client.generate("é🙂", LONG)]
        whole = Completion.join(chunks)
        assert whole.text == "é🙂"
        assert list(whole.token_ids) == [256, *"é🙂".encode()]
        assert [index for chunk in chunks for index in chunk.indices] == list(range(7))
        assert whole.finish_reason == "stop" and whole.usage == m.Usage(7, 7)
        assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])

    run(work())


def test_prompt_may_be_ids_text_or_messages(server: ScriptedServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            assert await client.generate_text(IDS, LONG) == "hi"
            assert await client.generate_text("hi", LONG) == "hi"
            assert await client.generate_text([{"role": "user", "content": "hi"}], LONG) == "[user]hi\n[assistant]"
            with pytest.raises(PromptError):
                await client.generate_text(["a", "b"], LONG)  # type: ignore[list-item]

    run(work())


def test_what_was_asked_is_what_is_sent(server: ScriptedServer) -> None:
    sampling = SamplingParams(max_tokens=3, temperature=0.5, seed=2**64 - 1, stop_token_ids=(1, 2))

    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            await client.complete(IDS, sampling, request_id="mine", priority=-1, cache_salt="salt")

    run(work())
    assert server.wait_for(m.Submit) == [m.Submit("mine", arrays.pack(IDS), sampling, -1, "salt")]


def test_many_requests_share_a_connection_unmixed(server: ScriptedServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            prompts = [[n] * (n + 1) for n in range(64)]
            answers = await asyncio.gather(*(client.complete(prompt, LONG) for prompt in prompts))
        assert [list(answer.token_ids) for answer in answers] == prompts

    run(work())


def test_slow_reader_gets_merged_chunks_and_every_token(server: ScriptedServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            stream = client.generate(list(range(100)), LONG)
            chunks = [await anext(stream)]
            await client.status()  # comes after all tokens on the same connection
            chunks += [chunk async for chunk in stream]
        assert len(chunks) <= 2
        assert list(Completion.join(chunks).token_ids) == list(range(100))

    run(work())


@pytest.mark.parametrize(("indices", "complaint"), [([0, 2], "token 1 is missing"), ([0, 1, 1], "token 1 came twice")])
def test_gap_or_repeat_is_an_error_and_ends_the_request(
    server: ScriptedServer, indices: list[int], complaint: str
) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if not isinstance(message, m.Submit):
            return False
        server.accept(identity, message)
        for index in indices:
            server.tokens(message.request_id, index, [7])
        return True

    server.handler = handler

    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            with pytest.raises(BrokenStream, match=complaint):
                await client.complete(IDS, LONG, request_id="bad")

    run(work())
    assert server.wait_for(m.Abort) == [m.Abort("bad")]


def test_end_that_counts_other_tokens_than_came_is_an_error(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if not hold(server, identity, message):
            return False
        assert isinstance(message, m.Submit)
        server.finish(message.request_id, 2)
        return True

    server.handler = handler

    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            with pytest.raises(BrokenStream, match="1 tokens arrived, the server counts 2"):
                await client.complete(IDS, LONG)

    run(work())


def test_rejection_carries_code_message_and_field(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if not isinstance(message, m.Submit) or message.sampling.max_tokens != 0:
            return False
        server.send(identity, m.Rejected(message.request_id, "invalid_request", "max_tokens must be 1", "max_tokens"))
        return True

    server.handler = handler

    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            with pytest.raises(RequestRejected) as caught:
                await client.complete(IDS, SamplingParams(max_tokens=0))
            assert (caught.value.code, caught.value.param) == ("invalid_request", "max_tokens")
            assert await client.generate_text(IDS) == "hi"  # the next one works

    run(work())


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([2**31], SamplingParams()),
        (IDS, SamplingParams(temperature="hot")),  # type: ignore[arg-type]
        (IDS, SamplingParams(seed=2**64)),
        (IDS, SamplingParams(max_tokens=2**70)),
        (IDS, SamplingParams(stop_token_ids=("a",))),  # type: ignore[arg-type]
    ],
)
def test_what_the_wire_cannot_carry_is_refused_before_sending(
    server: ScriptedServer, prompt: list[int], sampling: SamplingParams
) -> None:
    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            with pytest.raises(RequestRejected):
                await client.complete(prompt, sampling)
            await client.status()

    run(work())
    assert not any(isinstance(message, m.Submit) for message in server.received)


def test_running_request_id_is_not_given_twice(server: ScriptedServer) -> None:
    server.handler = hold

    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            stream = client.generate(IDS, LONG, request_id="one")
            await anext(stream)
            with pytest.raises(RequestRejected, match="duplicate_request"):
                await client.complete(IDS, LONG, request_id="one")

    run(work())


def test_failed_generation_gives_its_tokens_and_then_the_reason(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if not hold(server, identity, message):
            return False
        assert isinstance(message, m.Submit)
        server.finish(message.request_id, 1, "error", "took three workers down")
        return True

    server.handler = handler

    async def work() -> None:
        text = ""
        async with AsyncClient(server.endpoint) as client:
            with pytest.raises(GenerationFailed, match="took three workers down"):
                async for chunk in client.generate(IDS, LONG):
                    text += chunk.text
                    assert chunk.finish_reason is None
        assert text == "x"

    run(work())


def test_abort_ends_the_stream_with_that_reason(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Abort):
            server.finish(message.request_id, 1, "abort")
            return True
        return hold(server, identity, message)

    server.handler = handler

    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            stream = client.generate(IDS, LONG, request_id="long")
            chunks = [await anext(stream)]
            await client.abort("long")
            chunks += [chunk async for chunk in stream]
        assert chunks[-1].finish_reason == "abort"

    run(work())


@pytest.mark.parametrize("way", ["break", "context", "dropped", "cancelled", "closed client"])
def test_stream_that_is_left_early_is_aborted(server: ScriptedServer, way: str) -> None:
    server.handler = hold

    async def read(client: AsyncClient) -> None:
        async for _ in client.generate(IDS, LONG, request_id="left"):
            if way == "break":
                break

    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            if way == "break":
                await read(client)
            elif way == "context":
                async with client.generate(IDS, LONG, request_id="left") as stream:
                    await anext(stream)
            elif way == "dropped":
                await anext(client.generate(IDS, LONG, request_id="left"))
            elif way == "cancelled":
                task = asyncio.create_task(read(client))
                await asyncio.to_thread(server.wait_for, m.Submit)
                task.cancel()
                await asyncio.wait([task])
                del task
            else:
                stream = client.generate(IDS, LONG, request_id="left")
                await anext(stream)
            if way != "closed client":
                gc.collect()
                await asyncio.to_thread(server.wait_for, m.Abort)

    run(work())
    assert server.wait_for(m.Abort) == [m.Abort("left")]


def test_finished_stream_sends_no_abort(server: ScriptedServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            async with client.generate(IDS, LONG) as stream:
                async for _ in stream:
                    pass
            await client.status()

    run(work())
    assert not any(isinstance(message, m.Abort) for message in server.received)


def test_status_and_info(server: ScriptedServer) -> None:
    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            assert await client.status() == STATUS
            assert await client.server_info() == server.info
            answers = await asyncio.gather(*(client.status() for _ in range(5)))
            assert answers == [STATUS] * 5

    run(work())


def mute(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
    return True


def test_server_that_never_answers_is_unavailable(server: ScriptedServer) -> None:
    server.handler = mute

    async def work() -> None:
        async with AsyncClient(server.endpoint, timeout_s=0.3, silence_s=0.2) as client:
            with pytest.raises(ServerUnavailable, match=r"no answer from the server at tcp:.* within 0\.3 s"):
                await client.status()
            with pytest.raises(ServerUnavailable):
                await client.complete(IDS, detokenize=False)

    run(work())


def test_server_that_dies_while_streaming_is_unavailable(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        return hold(server, identity, message) or any(isinstance(old, m.Submit) for old in server.received)

    server.handler = handler

    async def work() -> None:
        async with AsyncClient(server.endpoint, timeout_s=0.5, silence_s=0.2) as client:
            stream = client.generate(IDS, LONG)
            assert (await anext(stream)).text == "x"
            with pytest.raises(ServerUnavailable):
                await anext(stream)

    run(work())


def test_long_silence_of_a_living_server_is_no_error(server: ScriptedServer) -> None:
    """As in a recovery: the server answers, the request just has no token for a while."""

    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        attached = sum(isinstance(old, m.Attach) for old in server.received)
        if isinstance(message, m.Attach) and attached < 3:
            _, handle, prompt_tokens = server.handles[message.request_id]
            server.send(identity, m.Accepted(message.request_id, handle, prompt_tokens))
            return True
        if isinstance(message, m.Attach):
            server.tokens(message.request_id, 0, [ord("x"), ord("y")])  # the first is a repeat
            server.finish(message.request_id, 2)
            return True
        return hold(server, identity, message)

    server.handler = handler

    async def work() -> None:
        async with AsyncClient(server.endpoint, timeout_s=0.3, silence_s=0.1) as client:
            assert await client.generate_text(IDS, LONG, request_id="slow") == "xy"

    run(work())
    assert server.wait_for(m.Attach, 4)[0] == m.Attach("slow", 1)


def test_repeat_after_a_reconnect_must_be_the_same_token(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Attach):
            server.tokens(message.request_id, 0, [ord("y")])
            return True
        return hold(server, identity, message)

    server.handler = handler

    async def work() -> None:
        async with AsyncClient(server.endpoint, silence_s=0.1) as client:
            with pytest.raises(BrokenStream, match=r"came twice \(first 120, now 121\)"):
                await client.complete(IDS, LONG)

    run(work())


def test_restarted_server_that_lost_the_request_says_so(server: ScriptedServer) -> None:
    server.handler = hold  # the default answer to Attach is "unknown request"

    async def work() -> None:
        async with AsyncClient(server.endpoint, silence_s=0.1) as client:
            with pytest.raises(RequestLost, match="send it again"):
                await client.complete(IDS, LONG)

    run(work())


def test_bytes_that_are_no_message_end_every_stream(server: ScriptedServer) -> None:
    def handler(server: ScriptedServer, identity: bytes, message: m.ClientToScheduler) -> bool:
        if isinstance(message, m.Submit):
            server._socket.send_multipart([identity, b"\x01garbage"])
            return True
        return False

    server.handler = handler

    async def work() -> None:
        async with AsyncClient(server.endpoint) as client:
            with pytest.raises(BrokenStream, match="bad message"):
                await client.complete(IDS, LONG)
            with pytest.raises(ServerUnavailable, match="given up"):
                await client.status()

    run(work())


def test_client_outside_async_with_says_so() -> None:
    with pytest.raises(ClientError, match="async with"):
        asyncio.run(AsyncClient("tcp://127.0.0.1:9").status())


def test_nonsense_endpoint_is_reported() -> None:
    async def work() -> None:
        async with AsyncClient("nonsense"):
            raise AssertionError("connected")

    with pytest.raises(ServerUnavailable, match="nonsense is no address"):
        run(work())


def test_without_a_server_the_error_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEPLANE_RUNTIME", str(tmp_path / "run"))

    async def work() -> None:
        async with AsyncClient():
            raise AssertionError("connected")

    with pytest.raises(ServerUnavailable, match=r"python launch\.py --workers 2"):
        run(work())
    gone = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(gone, 0)
    runtime.publish(runtime.create(), runtime.Endpoints("ipc:///c", "ipc:///w", "ipc:///s", pid=gone))
    with pytest.raises(ServerUnavailable, match=r"is gone; start one with: python launch\.py"):
        run(work())


def test_server_of_this_user_is_found(server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEPLANE_RUNTIME", str(tmp_path / "run"))
    runtime.publish(runtime.create(), runtime.Endpoints(server.endpoint, "", "", pid=os.getpid()))

    async def work() -> None:
        async with AsyncClient() as client:
            assert await client.generate_text(IDS) == "hi"

    run(work())
