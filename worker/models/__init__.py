"""Which class computes which architecture, and how a model comes to its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from protocol.model_config import ModelConfig
from worker.models.llama import LlamaModel
from worker.weights import WeightSource

if TYPE_CHECKING:
    from kernels.cpu.team import Team

MODELS = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
}


def build_model(
    config: ModelConfig,
    weights: WeightSource,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    max_positions: int | None = None,
    quantization: str = "none",
    team: Team | None = None,
) -> LlamaModel:
    """The network with its weights on `device`. It can be asked for positions 0 .. max_positions - 1. team: the threads
    that compute layers on a CPU; None: as many as PyTorch uses.

    Raises ValueError for an unknown architecture, WeightError if the weights are not those of this config,
    QuantizationUnavailable if this device or dtype has no layers of that kind.
    """
    try:
        model_class = MODELS[config.architecture]
    except KeyError:
        known = ", ".join(MODELS)
        raise ValueError(f"architecture {config.architecture!r} is not supported; supported are {known}") from None
    weights.check(model_class.tensor_shapes(config))
    with torch.inference_mode():
        return model_class(
            config, weights, dtype, device, max_positions or config.max_position_embeddings, quantization, team
        )
