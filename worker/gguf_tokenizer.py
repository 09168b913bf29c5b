"""The tokenizer inside a GGUF file as `tokenizer.json`, `tokenizer_config.json` and chat template.

Only byte-level BPE (`tokenizer.ggml.model = gpt2`); how text is split before BPE is named by `tokenizer.ggml.pre`,
and llama.cpp's names (src/llama-vocab.cpp) are mapped to the splitters of the original tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

# token types of the GGUF specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def write_tokenizer(get: Callable[..., Any], folder: Path, *, max_length: int) -> None:
    """Write the tokenizer files. `get(key, default)` reads the GGUF metadata. Raises ValueError."""
    kind = get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"GGUF tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2')")
    tokens: list[str] = get("tokenizer.ggml.tokens")
    tokenizer = build_tokenizer(
        tokens,
        get("tokenizer.ggml.merges", []),
        get("tokenizer.ggml.token_type", [1] * len(tokens)),
        get("tokenizer.ggml.pre", "default"),
        bos_id=get("tokenizer.ggml.bos_token_id") if get("tokenizer.ggml.add_bos_token", False) else None,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        token_id = get(f"tokenizer.ggml.{key}")
        if token_id is not None:
            config[name] = tokens[token_id]
    template = get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))


def build_tokenizer(
    tokens: list[str], merges: list[str], types: list[int], pre: str, *, bos_id: int | None
) -> Tokenizer:
    """A byte-level BPE tokenizer; bos_id, if given, is put before every text. Raises ValueError."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"GGUF tokenizer is inconsistent: {error}") from None
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == kind
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in ("smollm", "starcoder", "command-r", "codeshell", "refact"):
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}.get(pre)
    if split is None:
        raise ValueError(f"GGUF pre-tokenizer {pre!r} is not supported")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
