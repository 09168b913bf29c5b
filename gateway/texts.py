"""Text ↔ token ids off the event loop: one tokenizer, used in a pool of threads (it lets others run meanwhile)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from client import PromptError
from client.detokenizer import IncrementalDetokenizer
from client.tokenizer import Tokenizer
from gateway.errors import ApiError
from gateway.logprobs import TokenNames

_Result = TypeVar("_Result")


class Texts:
    """The served model's tokenizer. Every method raises ApiError(400) naming `param` for what cannot be converted."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._pool = ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="tokenizer")
        self._loading: Future[Tokenizer] | None = None

    def start_loading(self) -> None:
        """Begin to read the tokenizer, which takes a while."""
        self._loading = self._pool.submit(_load, self._folder)

    async def encode(self, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text."""
        return await self._run(lambda tokenizer: tokenizer.encode(text, add_special_tokens=add_special_tokens), param)

    async def encode_chat(self, messages: Sequence[dict[str, Any]], param: str, **variables: Any) -> list[int]:
        """Ids of a conversation, written by the model's chat template."""
        return await self._run(lambda tokenizer: tokenizer.encode_chat(messages, **variables), param)

    async def decode(self, token_ids: Sequence[int], param: str) -> str:
        """Text of ids, special tokens left out."""
        return await self._run(lambda tokenizer: tokenizer.decode(token_ids), param)

    async def token_strings(self, token_ids: Sequence[int], param: str) -> list[str]:
        """Each token as the vocabulary writes it."""
        return await self._run(lambda tokenizer: tokenizer.token_strings(token_ids), param)

    async def token_names(self, by_id: bool) -> TokenNames:
        """How tokens are written beside their log-probabilities."""
        return await self._run(
            lambda tokenizer: TokenNames(tokenizer.token_bytes, tokenizer.special_ids, by_id), "logprobs"
        )

    async def detokenizers(self, count: int) -> list[IncrementalDetokenizer]:
        """Fresh incremental decoders."""
        return await self._run(lambda tokenizer: [tokenizer.detokenizer() for _ in range(count)], "model")

    async def _run(self, work: Callable[[Tokenizer], _Result], param: str) -> _Result:
        assert self._loading is not None, "start_loading comes first"
        try:
            tokenizer = await asyncio.wrap_future(self._loading)
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, tokenizer)
        except PromptError as error:
            raise ApiError(400, str(error), param=param) from None
        except (UnicodeError, TypeError, OverflowError, RecursionError) as error:  # a lone surrogate, an id too large
            raise ApiError(400, f"cannot be tokenised: {error}", param=param) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(folder)
    tokenizer.detokenizer()  # what all of them share is found out now
    return tokenizer
