"""Tiny random models as Hugging Face folders, for tests of anything that serves a model. Deterministic.

`tiny_model(kind)` writes each kind once per process: config, weights (values that bfloat16 holds exactly), a
byte-level tokenizer (token id = byte for 0..255, then the special tokens) and a chat template. `transformers` opens
them too, so it can be the oracle.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from protocol.model_config import ModelConfig
from worker.gguf_import import write_bfloat16_safetensors
from worker.models.llama import LlamaModel

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
IM_END = 258
WINDOW = 12
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": IM_END,
    "pad_token_id": 256,
    "torch_dtype": "bfloat16",
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True, "head_dim": 32, "num_key_value_heads": 1},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear-rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    # every layer looks through the window
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    # window layers and full layers: two KV cache groups
    "mixed": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
}


@functools.cache
def tiny_model(kind: str = "llama") -> Path:
    """The folder of a kind, written at the first call and removed when the process ends."""
    return write_tiny_model(_root() / kind, **KINDS[kind])


def write_tiny_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a model whose config.json is the base one with `overrides`; the weights depend on seed and names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_BASE | overrides, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": IM_END}))
    _write_tokenizer(folder)
    shapes = LlamaModel.tensor_shapes(ModelConfig.from_folder(folder))
    random = np.random.default_rng(seed)
    write_bfloat16_safetensors(
        folder / "model.safetensors", shapes, (_tensor(random, name, shape) for name, shape in shapes.items())
    )
    return folder


def _tensor(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Large enough that the greatest logit stands out, or two right computations would pick different tokens."""
    values = random.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + values / 4
    if name.endswith(".bias"):
        return values / 4
    if name == "model.embed_tokens.weight":
        return values
    return values * (2 if name == "lm_head.weight" else 1.2) / np.sqrt(np.float32(shape[1]))


def _write_tokenizer(folder: Path) -> None:
    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte (GPT-2, `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="pageplane-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root
