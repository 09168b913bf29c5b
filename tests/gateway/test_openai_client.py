"""The official `openai` client against a real deployment: what it asks for is what it gets."""

from __future__ import annotations

from typing import Any

import openai as sdk
import pytest
from openai import OpenAI

from client import SamplingParams
from client.tokenizer import Tokenizer
from tests.integration.deployment import Deployment
from tests.tiny_model import tiny_model

MODEL = "tiny"
TOKENIZER = Tokenizer(tiny_model())
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a page table?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}


def streamed_chat(openai: OpenAI, **options: Any) -> tuple[dict[int, str], dict[int, str | None], Any]:
    """By choice: the joined text and the finish reason; and the usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    usage = None
    options = {**GREEDY, "messages": MESSAGES, **options}
    for chunk in openai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options):
        assert usage is None, "nothing comes after the usage"
        usage = chunk.usage
        assert bool(chunk.choices) != bool(usage)
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after a finish reason"
            assert (choice.delta.role == "assistant") == (choice.index not in texts), "the role comes once, first"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def test_models(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL]
    assert openai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(sdk.NotFoundError):
        openai.models.retrieve("gpt-9")


def test_chat_is_what_the_client_protocol_says(openai: OpenAI, server: Deployment) -> None:
    answer = openai.chat.completions.create(messages=MESSAGES, **GREEDY)
    direct = server.client.complete(MESSAGES, SamplingParams(max_tokens=24, temperature=0.0))
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", direct.text)
    assert choice.finish_reason == direct.finish_reason
    assert answer.usage is not None
    prompt = len(TOKENIZER.encode_chat(MESSAGES))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(direct.token_ids))
    assert answer.usage.total_tokens == prompt + len(direct.token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 7},
        {"temperature": 0.7, "top_p": 0.9, "seed": 2**64 - 1, "n": 2},
        {"extra_body": {"ignore_eos": True, "min_tokens": 24, "top_k": 5, "min_p": 0.01}},
        {"max_tokens": 1},
    ],
)
def test_a_stream_joins_to_the_whole_answer_with_the_same_usage(openai: OpenAI, options: dict[str, Any]) -> None:
    whole = openai.chat.completions.create(**{**GREEDY, "messages": MESSAGES, **options})
    texts, reasons, usage = streamed_chat(openai, **options)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert usage.prompt_tokens_details.cached_tokens >= 16, "the first question left the prompt in the cache"


@pytest.mark.parametrize("n", [1, 3])
def test_the_usage_so_far_grows_token_by_token_to_the_whole(openai: OpenAI, n: int) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        openai.completions.create(
            model=MODEL, prompt="Once", max_tokens=20, n=n, seed=3, stream=True, stream_options=options,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
    )  # fmt: skip
    seen = 0
    for chunk in chunks[:-1]:
        seen += len(chunk.choices[0].token_ids)  # type: ignore[attr-defined]
        assert chunk.usage is not None
        assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (4, seen)
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == seen == 20 * n


def test_choice_i_draws_with_seed_plus_i(openai: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 12, "temperature": 1.2}
    three = openai.completions.create(n=3, seed=40, **options)
    alone = [openai.completions.create(seed=40 + i, **options).choices[0].text for i in range(3)]
    assert [choice.text for choice in three.choices] == alone
    assert len(set(alone)) == 3
    assert three.usage is not None
    assert three.usage.prompt_tokens == 4, "the prompt is counted once"
    assert three.usage.completion_tokens == 36


def test_max_completion_tokens_goes_before_max_tokens(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=9, max_completion_tokens=3, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


def test_prompts_as_text_and_as_ids_one_and_several(openai: OpenAI) -> None:
    texts = ["Once", "upon a time"]
    ids = [list(text.encode()) for text in texts]
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    alone = [openai.completions.create(prompt=text, **options).choices[0].text for text in texts]
    for prompt in (texts, ids):
        answer = openai.completions.create(prompt=prompt, **options)  # type: ignore[call-overload]
        assert [choice.text for choice in answer.choices] == alone
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert openai.completions.create(prompt=ids[1], **options).choices[0].text == alone[1]


def test_echo_puts_the_prompt_first(openai: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    plain = openai.completions.create(prompt="Once", **options).choices[0].text
    for prompt in ("Once", list(b"Once")):
        assert openai.completions.create(prompt=prompt, echo=True, **options).choices[0].text == "Once" + plain
        chunks = openai.completions.create(prompt=prompt, echo=True, stream=True, **options)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Once" + plain


def test_stop_strings_over_token_borders(openai: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "Count: 1 2 3", "max_tokens": 200, "temperature": 1, "seed": 5}
    options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    free = openai.completions.create(**options).choices[0].text
    stop = free[10:13]
    place = free.find(stop)
    answer = openai.completions.create(stop=["never in it", stop], **options)
    choice: Any = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (free[:place], "stop", stop)
    assert answer.usage is not None and answer.usage.completion_tokens == len(choice.token_ids)
    assert TOKENIZER.decode(choice.token_ids).startswith(free[: place + len(stop)])
    pieces = [chunk.choices[0].text for chunk in openai.completions.create(stop=stop, stream=True, **options)]
    assert "".join(pieces) == free[:place]
    options["extra_body"]["include_stop_str_in_output"] = True
    assert openai.completions.create(stop=stop, **options).choices[0].text == free[: place + len(stop)]


def test_stop_token_ids(openai: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "Count: 1 2 3", "max_tokens": 50, "temperature": 1, "seed": 5}
    extra = {"ignore_eos": True, "return_token_ids": True}
    free: Any = openai.completions.create(extra_body=extra, **options).choices[0]
    token = free.token_ids[7]
    length = free.token_ids.index(token) + 1
    stopped: Any = openai.completions.create(extra_body={**extra, "stop_token_ids": [token]}, **options).choices[0]
    assert stopped.token_ids == free.token_ids[:length]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
    assert stopped.text == TOKENIZER.decode(free.token_ids[: length - 1])


def test_a_conversation_has_exactly_one_beginning(openai: OpenAI) -> None:
    answer: Any = openai.chat.completions.create(
        messages=[{"role": "user", "content": "hi"}], extra_body={"return_token_ids": True}, **GREEDY
    )
    ids = answer.choices[0].prompt_token_ids
    assert ids == TOKENIZER.encode_chat([{"role": "user", "content": "hi"}])
    assert ids.count(257) == 2, "one per message and one for the answer, none in front"


def test_parts_of_a_message_are_joined(openai: OpenAI) -> None:
    def ask(content: Any) -> str | None:
        messages: Any = [{"role": "user", "content": content}]
        return openai.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content

    assert ask([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == ask("a\nb")


def test_leaving_in_the_middle_frees_everything(openai: OpenAI, server: Deployment) -> None:
    stream = openai.chat.completions.create(
        messages=MESSAGES, model=MODEL, max_tokens=2000, stream=True, n=3, extra_body={"ignore_eos": True}
    )
    next(stream)
    stream.close()
    server.wait_idle(timeout_s=5.0)


@pytest.mark.parametrize(
    ("error", "param", "options"),
    [
        (sdk.NotFoundError, "model", {"model": "gpt-9"}),
        (sdk.BadRequestError, "temperature", {"temperature": -1}),
        (sdk.BadRequestError, "max_tokens", {"max_tokens": 0}),
        (sdk.BadRequestError, "n", {"n": 0}),
        (sdk.BadRequestError, "messages", {"messages": []}),
        (sdk.BadRequestError, "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        (sdk.BadRequestError, "messages", {"messages": [{"role": "user", "content": "x" * 5000}]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_the_parameter(openai: OpenAI, error: Any, param: str, options: Any, stream: bool) -> None:
    with pytest.raises(error) as caught:
        openai.chat.completions.create(**{**GREEDY, "messages": MESSAGES, "stream": stream, **options})
    assert caught.value.param == param
    assert caught.value.type


def test_the_request_id_is_the_clients(openai: OpenAI) -> None:
    answer = openai.chat.completions.with_raw_response.create(
        messages=MESSAGES, extra_headers={"X-Request-Id": "mine-1"}, **GREEDY
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.parse().id == "chatcmpl-mine-1"
