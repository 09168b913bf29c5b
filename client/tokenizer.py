"""Prompts → token ids, by the tokenizer and chat template in a model's folder. Needs neither a server nor torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from client.chat_template import ChatTemplate, Message
from client.detokenizer import DecoderTraits, IncrementalDetokenizer
from client.errors import PromptError
from client.token_bytes import TokenBytes


class Tokenizer:
    """`tokenizer.json` and, if the model has one, its chat template."""

    def __init__(self, folder: str | Path):
        """Read the folder. Raises PromptError naming the file that is missing or damaged."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise PromptError(f"{path} does not exist on this machine; without it only token ids can be sent")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise PromptError(f"{path} cannot be read: {error}") from None
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        bos = special_tokens.get("bos_token")
        self._traits: DecoderTraits | None = None
        self._token_bytes: TokenBytes | None = None
        self._bos_id: int | None = None if bos is None else self._tokenizer.token_to_id(bos)
        source = _template_source(folder, config)
        self.chat_template = None if source is None else ChatTemplate(source, special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text, with the special tokens (at most one BOS) that the model expects around it."""
        ids = self._ids(text, add_special_tokens)
        if (
            add_special_tokens and self._bos_id is not None and ids[:2] == [self._bos_id] * 2
        ):  # the text brought its own
            return ids[1:]
        return ids

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a conversation, by default up to where the answer begins. The template alone decides about special
        tokens; `variables` are what else it may know."""
        if self.chat_template is None:
            raise PromptError("the model has no chat template; send plain text (or --raw)")
        _check_messages(messages)
        text = self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self._ids(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return str(self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=True)[0])

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # a batch, even of one: only then does the library let other threads run meanwhile; and without offsets
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each id's token as the vocabulary writes it ("" for an id that it lacks)."""
        return [self._tokenizer.id_to_token(token) or "" for token in token_ids]

    @property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        if self._token_bytes is None:
            self._token_bytes = TokenBytes(self._tokenizer)
        return self._token_bytes

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that have no text in an answer."""
        return self._decoder_traits.special_ids

    def detokenizer(self) -> IncrementalDetokenizer:
        """A fresh incremental decoder for one output."""
        return IncrementalDetokenizer(self._tokenizer, self._decoder_traits)

    @property
    def _decoder_traits(self) -> DecoderTraits:
        if self._traits is None:
            self._traits = DecoderTraits.of(self._tokenizer)
        return self._traits


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise PromptError("messages must not be empty")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError(f'messages[{index}] must be an object like {{"role": "user", "content": "…"}}')


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PromptError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", …}. A token is stored as its text or as an object with it under "content"."""
    found = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """A file of its own (as transformers saves it since 4.52) comes before the entry in the configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    stored = config.get("chat_template")
    if isinstance(stored, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
        stored = named.get("default")
    return stored if isinstance(stored, str) else None
