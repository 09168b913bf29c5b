"""Rotary position embedding: the table of cosines and sines. The rotation itself is in `ops`.

The pair (x_i, x_{i + D/2}) of a head is turned by the angle position * frequency_i (Su et al. 2021, RoFormer; the
half-split order is Hugging Face's). Frequencies and angles are float32, like transformers', so that the same weights
give the same tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from protocol.model_config import ModelConfig


def rope_frequencies(config: ModelConfig) -> Tensor:
    """float32 [D/2], in radians per position, with the model's `rope_scaling` applied. Raises ValueError."""
    dim = config.head_dim
    frequencies = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ValueError(f"rope_scaling of type {kind!r} is not supported; supported are linear and llama3")


def rope_table(config: ModelConfig, num_positions: int, device: torch.device | str) -> Tensor:
    """float32 [num_positions, D]: D/2 cosines, then D/2 sines."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * rope_frequencies(config)[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended. Source: Llama 3.1's
    reference code, `apply_scaling`."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    old_length = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    smooth = (old_length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > old_length / low, frequencies / factor, blended)
    return torch.where(wavelengths < old_length / high, frequencies, scaled)
