"""Turn a GGUF file into a Hugging Face folder: config, bfloat16 safetensors, tokenizer, chat template. No torch.

Weights are dequantised to float32 and rounded to bfloat16, one tensor in memory at a time. llama.cpp stores the
rows of Q and K of the `llama` architecture interleaved (pairs 2i, 2i+1 rotate together, `permute` in its
convert_hf_to_gguf.py); they are put back into Hugging Face's order (i and i + D/2 rotate together).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from worker.gguf_tokenizer import write_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFImportError(ValueError):
    """The file is no GGUF, or holds a model or tokenizer that we cannot serve; the message says what."""


class Metadata:
    """The key-value part of a GGUF file; keys of the model are looked up under its architecture."""

    def __init__(self, reader: GGUFReader) -> None:
        self.reader = reader
        self.architecture = str(self.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def model(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        value = self.model(key)
        if value is None:
            raise GGUFImportError(f"the GGUF file lacks {self.architecture}.{key}")
        return value


def open_gguf(path: Path) -> GGUFReader:
    """Map the file and read its header. Raises GGUFImportError if it is none."""
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise GGUFImportError(f"{path} is no readable GGUF file: {error}") from None


def convert(reader: GGUFReader, folder: Path, progress: Callable[[int], None] = lambda done: None) -> None:
    """Write the model of an open GGUF file into the existing `folder`.

    progress(bytes of weights written so far). Raises GGUFImportError.
    """
    metadata = Metadata(reader)
    config = build_config(metadata, {tensor.name: tensor for tensor in reader.tensors})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    try:
        write_tokenizer(metadata.get, folder, max_length=config["max_position_embeddings"])
    except ValueError as error:
        raise GGUFImportError(str(error)) from None
    tensors = [tensor for tensor in reader.tensors if tensor.name != "rope_freqs.weight"]
    shapes = {hf_name(t.name): tuple(int(n) for n in reversed(t.shape)) for t in tensors}
    values = (_values(tensor, config, metadata.architecture) for tensor in tensors)
    write_bfloat16_safetensors(folder / "model.safetensors", shapes, values, progress)


def total_bytes(reader: GGUFReader) -> int:
    """Bytes of weights that `convert` will write."""
    return sum(2 * int(np.prod(t.shape)) for t in reader.tensors)


def build_config(metadata: Metadata, tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    """The fields of `config.json`, from the GGUF keys."""
    if metadata.architecture not in ARCHITECTURES:
        raise GGUFImportError(
            f"GGUF architecture {metadata.architecture!r} is not supported; supported are "
            + ", ".join(sorted(ARCHITECTURES))
        )
    if "token_embd.weight" not in tensors:
        raise GGUFImportError("the GGUF file lacks the tensor token_embd.weight")
    heads = int(metadata.require("attention.head_count"))
    hidden = int(metadata.require("embedding_length"))
    head_dim = int(metadata.model("attention.key_length") or hidden // heads)
    theta = _shortest(metadata.model("rope.freq_base", 10000.0))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": int(metadata.require("feed_forward_length")),
        "num_hidden_layers": int(metadata.require("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata.model("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.require("context_length")),
        "rms_norm_eps": _shortest(metadata.require("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, tensors, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": metadata.architecture == "qwen2" or "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    return config


def hf_name(name: str) -> str:
    """'blk.3.attn_q.weight' → 'model.layers.3.self_attn.q_proj.weight'. Raises GGUFImportError."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
    raise GGUFImportError(f"the GGUF file holds a tensor that this model family has not: {name}")


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """[heads * D, ...] with rotating pairs (2i, 2i+1) → pairs (i, i + D/2), per head."""
    head_dim = rows.shape[0] // num_heads
    paired = rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 → uint16 bit patterns of bfloat16, rounded to nearest, ties to even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def write_bfloat16_safetensors(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    values: Iterable[np.ndarray],
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Stream float32 arrays, in the order of `shapes`, into one safetensors file of dtype BF16.

    Format: u64 little-endian header length, JSON header, then the data
    (https://huggingface.co/docs/safetensors, "Format"). Written by hand since the library wants all tensors at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        for (name, shape), array in zip(shapes.items(), values, strict=True):
            if array.shape != shape:
                raise GGUFImportError(f"tensor {name} has the shape {array.shape}, not {shape}")
            file.write(to_bfloat16_bits(array).astype("<u2", copy=False).data)
            progress(file.tell() - start)


def _values(tensor: ReaderTensor, config: dict[str, Any], architecture: str) -> np.ndarray:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise GGUFImportError(f"tensor {tensor.name} is quantised as {kind}, which cannot be read") from None
    if architecture == "llama":
        if ".attn_q." in tensor.name:
            return unpermute(values, config["num_attention_heads"])
        if ".attn_k." in tensor.name:
            return unpermute(values, config["num_key_value_heads"])
    return values


def _rope_scaling(
    metadata: Metadata, tensors: dict[str, ReaderTensor], theta: float, head_dim: int
) -> dict[str, Any] | None:
    """GGUF names linear scaling in a key; Llama 3's it stores as one divisor per frequency, `rope_freqs`."""
    if "rope_freqs.weight" in tensors:
        stored = np.asarray(tensors["rope_freqs.weight"].data, dtype=np.float64).reshape(-1)
        scaling = {
            "rope_type": "llama3",
            "factor": float(round(stored.max(), 3)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if not np.allclose(stored, llama3_divisors(scaling, theta, head_dim), rtol=1e-3):
            raise GGUFImportError("rope_freqs.weight does not follow Llama 3's RoPE scaling")
        return scaling
    kind = metadata.model("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(metadata.require("rope.scaling.factor"))}
    raise GGUFImportError(f"RoPE scaling {kind!r} is not supported; supported are linear and llama3")


def llama3_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """float64 [D/2]: what each RoPE frequency is divided by. Source: transformers, `_compute_llama3_parameters`."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    old = scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((old / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / factor + smooth))


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
