"""The scales of a quantised KV cache: what the greatest K and V of a head are, seen once, before anything is served.

They are static: one number per layer and KV head for K and for V, so a block means the same to every request, and a
prefix hit reads what a neighbour wrote. All workers watch the same tokens, so they agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.metadata import AttentionMetadata
from kernels.quantise import LIMITS
from kernels.torch_backend import TorchBackend
from worker.kv_cache import LayerScales
from worker.models.llama import LlamaModel

KV_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
"""`--kv-cache-dtype` → the quantised dtype; None: the model's own."""

HEADROOM = 1.25
"""How far beyond what was seen a number may go before it is clamped. An int8 cache pays for it in precision."""

_TOKENS = 256
_SEED = 0


class _Watching(TorchBackend):
    """Attention as it is, and the greatest |K| and |V| per head of every layer on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: list[LayerScales] = []

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        self.peaks.append((_peaks(k), _peaks(v)))
        super().write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def find_scales(model: LlamaModel, dtype: torch.dtype, max_positions: int) -> list[LayerScales]:
    """Per layer, from one run over random tokens of the vocabulary. dtype: of the cache, one of `quantise.LIMITS`."""
    config = model.config
    length = min(_TOKENS, max_positions)
    tokens = torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(_SEED))
    watching = _Watching()
    shape = (2, config.num_kv_heads, length, config.head_dim)  # one block holds all; block 0 is nobody's
    cache = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2)]
    metadata = AttentionMetadata.build([length], [length], [[1]], length, model.device)
    model.forward(
        tokens.to(model.device),
        torch.arange(length, device=model.device),
        [(cache[0], cache[1])] * config.num_layers,
        [metadata] * config.num_layers,
        watching,
    )
    factor = HEADROOM / LIMITS[dtype]
    return [(_positive(k * factor), _positive(v * factor)) for k, v in watching.peaks]


def _peaks(x: Tensor) -> Tensor:
    """[T, num_kv_heads, D] → float32 [num_kv_heads]."""
    return x.abs().amax(dim=(0, 2)).float()


def _positive(scale: Tensor) -> Tensor:
    """A head that is always zero gets the scale 1: nothing is divided by zero."""
    return torch.where(scale > 0, scale, 1.0)
