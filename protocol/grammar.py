"""What the shape of an output (`StructuredOutputsParams`) means: the grammar that llguidance makes of it, and limits.

Shared by the gateway, which refuses what does not compile, and the worker, which draws by it; both get the same answer.
A grammar is bounded in what it may cost: to compile, at each token, and in memory. Source: llguidance's documentation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from protocol.messages import StructuredOutputsParams

ANY_OBJECT = '{"type": "object"}'

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the tokens of JSON. Bounded: some models, once they have begun with blanks, never end."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""About 10 ms for a compilation's lexer, 15 ms for a token, 40 MB of states for an output."""


class BadGrammar(ValueError):
    """Not a grammar, one that nothing satisfies, or one that exceeds a limit; the message says which."""


def open_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """A model's tokens as grammars need them: as bytes. Takes a moment. Raises BadGrammar without tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BadGrammar(f"{path} does not exist: outputs of a given shape need the model's tokenizer")
    try:
        return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except Exception as error:  # llguidance raises bare Exception
        raise BadGrammar(f"{path} cannot be used for grammars: {error}") from None


def compile_grammar(vocabulary: LLTokenizer, shape: StructuredOutputsParams) -> LLMatcher:
    """A matcher at the start of an output. Raises BadGrammar."""
    matcher = LLMatcher(vocabulary, source_of(shape), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise BadGrammar(_first_line(matcher.get_error()))
    return matcher


def check_grammar(vocabulary: LLTokenizer, shape: StructuredOutputsParams) -> None:
    """Raises BadGrammar unless it compiles and an output can begin."""
    matcher = compile_grammar(vocabulary, shape)
    mask = allocate_token_bitmask(1, vocabulary.vocab_size)
    fill_masks([(matcher, 0)], mask)
    if matcher.is_error():
        raise BadGrammar(_first_line(matcher.get_error()))
    if not mask.any():
        raise BadGrammar("no output satisfies it")


def fill_masks(matchers: Sequence[tuple[LLMatcher, int]], masks: NDArray[np.int32], num_threads: int = 1) -> None:
    """Write the tokens that may come next to masks[index] of each (matcher, index): a bit a token, lowest bit first.

    masks: int32 [n, ⌈V / 32⌉]. Several are made in parallel.
    """
    if num_threads > 1 and len(matchers) > 1:
        fill_next_token_bitmask_par(_executor(num_threads), list(matchers), masks)
        return
    for matcher, index in matchers:
        fill_next_token_bitmask(matcher, masks, index)


@cache
def _executor(num_threads: int) -> LLExecutor:
    return LLExecutor(num_threads)


def source_of(shape: StructuredOutputsParams) -> str:
    """llguidance's source of a grammar. Raises BadGrammar for what is no text, JSON or list."""
    try:
        for text in (shape.json, shape.regex, *shape.choice):
            if text is not None:
                text.encode()  # a lone surrogate is no text
        if shape.json is not None or shape.json_object:
            return str(
                LLMatcher.grammar_from_json_schema(
                    shape.json or ANY_OBJECT, defaults={"whitespace_pattern": WHITESPACE}
                )
            )
        if shape.regex:
            return str(LLMatcher.grammar_from_regex(shape.regex))
        if not shape.choice or not all(shape.choice):
            raise BadGrammar("it is empty")
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in shape.choice)
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    except (UnicodeError, ValueError) as error:
        raise BadGrammar(_first_line(str(error))) from None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0] or "it cannot be compiled"
