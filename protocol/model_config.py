"""What both planes must know of a model: its shapes, as read from a Hugging Face `config.json`. No weights, no torch.

The scheduler needs the vocabulary, the longest sequence and which layers share a KV-cache spec; the worker builds
the network from the same facts; `fingerprint` lets the handshake prove that both read the same ones.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from protocol.messages import KVCacheGroupSpec

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


class ModelConfigError(ValueError):
    """The folder holds no model that we can serve; the message says what is missing or unsupported."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes of a Llama-family decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_scaling: dict[str, Any] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int, ...] = ()
    """Per layer: the sliding window in tokens (keys seen, the token itself included), 0 for full attention."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def windows(self) -> tuple[int, ...]:
        """The distinct windows, full attention (0) first: one KV cache group each, in this order."""
        return tuple(sorted(set(self.layer_windows)))

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ when any fact above differs."""
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=8).hexdigest()

    @property
    def cache_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """Layers of one window share a block table: one group per window, in the order of `windows`."""
        return tuple(
            KVCacheGroupSpec(
                sliding_window=window,
                layer_ids=tuple(layer for layer, own in enumerate(self.layer_windows) if own == window),
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
            )
            for window in self.windows
        )

    @staticmethod
    def from_folder(folder: str | Path) -> ModelConfig:
        """Read `config.json` (and the stop ids of `generation_config.json`) of a Hugging Face folder.

        Raises ModelConfigError when a file or field is missing or the architecture is not supported.
        """
        folder = Path(folder)
        path = folder / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise ModelConfigError(f"{folder} is no model folder: it holds no config.json") from None
        except (OSError, ValueError) as error:
            raise ModelConfigError(f"{path} cannot be read: {error}") from None
        if not isinstance(raw, dict):
            raise ModelConfigError(f"{path} cannot be read: it holds no JSON object")
        generation: dict[str, Any] = {}
        generation_path = folder / "generation_config.json"
        if generation_path.is_file():
            try:
                generation = json.loads(generation_path.read_text())
            except ValueError as error:
                raise ModelConfigError(f"{generation_path} is no JSON: {error}") from None
        try:
            return _parse(raw, generation)
        except KeyError as error:
            raise ModelConfigError(f"{path} lacks the field {error}") from None
        except ModelConfigError:
            raise
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ModelConfigError(f"{path} has a field of the wrong type or value: {error}") from None


def _parse(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    architecture = (raw.get("architectures") or ["missing"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelConfigError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    heads = raw["num_attention_heads"]
    layers = raw["num_hidden_layers"]
    rope = raw.get("rope_parameters") or {}  # transformers 5 moved theta and scaling here
    scaling = raw.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    qwen2 = architecture == "Qwen2ForCausalLM"
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        max_position_embeddings=raw["max_position_embeddings"],
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        rms_norm_eps=float(raw["rms_norm_eps"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bool(raw.get("attention_bias", False)) or qwen2,
        o_bias=bool(raw.get("attention_bias", False)) and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        layer_windows=_layer_windows(raw, architecture, layers),
        eos_token_ids=_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        bos_token_id=raw.get("bos_token_id"),
    )


def _layer_windows(raw: dict[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    window = raw.get("sliding_window")
    if architecture.startswith("Qwen") and not raw.get("use_sliding_window", False):
        window = None
    if architecture == "LlamaForCausalLM":
        window = None
    if not window:
        return (0,) * layers
    kinds = raw.get("layer_types")
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)
    if architecture.startswith("Qwen"):  # the first max_window_layers see everything
        first = raw.get("max_window_layers", layers)
        return tuple(0 if layer < first else int(window) for layer in range(layers))
    return (int(window),) * layers


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
