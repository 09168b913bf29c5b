"""Prompts become the token ids that `transformers` makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizers import BOS, TEMPLATE, write_folder

from client.chat_template import ChatTemplate
from client.errors import PromptError
from client.tokenizer import Tokenizer

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "<b>你好</b> & 🙂"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Bye"},
]
TRICKY = """
{%- set ns = namespace(first=true) %}
{%- for message in messages %}
    {%- if message['role'] == 'skip' %}
        {%- continue %}
    {%- endif %}
    {% generation %}
{{ message | tojson }}
    {% endgeneration %}
    {%- set ns.first = false %}
{%- endfor %}
  {% if add_generation_prompt %}
>>{{ eos_token }}
  {% endif %}
"""


def test_plain_text_gets_one_bos_even_if_it_brings_one(model_folder: Path) -> None:
    tokenizer = Tokenizer(model_folder)
    assert tokenizer.encode("ab") == [BOS, ord("a"), ord("b")]
    assert tokenizer.encode("<s>ab") == [BOS, ord("a"), ord("b")]


def test_chat_has_exactly_one_bos(model_folder: Path) -> None:
    ids = Tokenizer(model_folder).encode_chat(CONVERSATION)
    assert ids.count(BOS) == 1 and ids[0] == BOS


@pytest.mark.parametrize("template", [TEMPLATE, TRICKY])
def test_chat_ids_equal_those_of_transformers(tmp_path: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write_folder(tmp_path / "model", template)
    oracle = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    expected = oracle.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(CONVERSATION) == expected
    ids = oracle(expected, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode_chat(CONVERSATION) == ids


def test_template_file_comes_before_the_configured_one(model_folder: Path) -> None:
    (model_folder / "chat_template.jinja").write_text("x{{ messages[0].content }}")
    assert Tokenizer(model_folder).encode_chat([{"role": "user", "content": "y"}]) == [ord("x"), ord("y")]


def test_of_several_templates_the_default_is_used(model_folder: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (model_folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer(model_folder).encode_chat([{"role": "user", "content": "y"}]) == [ord("d")]


def test_strftime_now_gives_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]).startswith("2")


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "must not be empty"),
        ([{"content": "no role"}], r"messages\[0\]"),
        (["text"], r"messages\[0\]"),
        ([{"role": "tool", "content": ""}], "no tools here"),
    ],
)
def test_bad_messages_are_named(model_folder: Path, messages: list, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint):
        Tokenizer(model_folder).encode_chat(messages)


def test_template_cannot_reach_out_of_the_sandbox() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(PromptError, match="unsafe"):
        template.render([])


def test_broken_template_is_reported() -> None:
    with pytest.raises(PromptError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_folder_without_tokenizer_or_template_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    folder = write_folder(tmp_path / "model", template=None)
    with pytest.raises(PromptError, match="no chat template"):
        Tokenizer(folder).encode_chat([{"role": "user", "content": "y"}])


def test_damaged_tokenizer_is_reported(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{")
    with pytest.raises(PromptError, match="cannot be read"):
        Tokenizer(model_folder)
