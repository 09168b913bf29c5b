"""Tokenizers small enough to reason about: one token a byte, and SentencePiece's kind with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level() -> Tokenizer:
    """Token id = byte (0 to 255), <s> = 256 in front of every text, </s> = 257. No merges: every byte is a token."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in byte_characters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def byte_fallback() -> Tokenizer:
    """Ids 0 to 255 are <0x00> … <0xFF>, then ▁, ▁a, a, b; 260 is </s>, special."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁a", "a", "b"]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    return tokenizer


def write_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A model folder with the byte-level tokenizer and a chat template."""
    folder.mkdir(exist_ok=True)
    byte_level().save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
