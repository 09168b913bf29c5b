"""Whether the shape that an output is to have can be had: compiled here first, so that no worker meets a bad grammar.

In threads, off the event loop (llguidance releases the GIL); what a grammar may cost is bounded by its limits. A few
good ones are remembered, since clients ask for the same shape again and again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLTokenizer

from gateway.errors import ApiError
from protocol.grammar import BadGrammar, check_grammar, open_vocabulary
from protocol.messages import StructuredOutputsParams

REMEMBERED = 64
MAX_CHARS = 65536
"""As many as the scheduler takes."""


class Grammars:
    """The served model's vocabulary, read when a grammar first needs it."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]):
        self._model = (folder, vocab_size, eos_token_ids)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._vocabulary: Future[LLTokenizer] | None = None
        self._good: OrderedDict[StructuredOutputsParams, None] = OrderedDict()

    async def check(self, shape: StructuredOutputsParams, param: str) -> None:
        """Raises ApiError(400) naming `param` unless outputs of this shape can be generated."""
        if shape in self._good:
            self._good.move_to_end(shape)
            return
        if len(shape.json or "") + len(shape.regex or "") + sum(map(len, shape.choice)) > MAX_CHARS:
            raise ApiError(400, f"{param} has more than {MAX_CHARS} characters", param=param)
        if self._vocabulary is None:
            self._vocabulary = self._pool.submit(open_vocabulary, *self._model)
        try:
            vocabulary = await asyncio.wrap_future(self._vocabulary)
            await asyncio.get_running_loop().run_in_executor(self._pool, check_grammar, vocabulary, shape)
        except BadGrammar as error:
            raise ApiError(400, f"{param} cannot be followed: {error}", param=param, code="invalid_grammar") from None
        self._good[shape] = None
        if len(self._good) > REMEMBERED:
            self._good.popitem(last=False)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
