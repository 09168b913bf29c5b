"""y = x Wᵀ + b, in the fastest form a device has. Knows nothing of what the weight means.

On the CPU the weight is packed once into oneDNN's blocked layout; one packing serves all batch sizes. Measured on two
cores of an AVX512-BF16 Xeon against `F.linear`: 1.2 to 1.9 times faster in bfloat16 and up to 2.3 times in float32
for 1 to 64 rows. (The operators are those that torch.compile uses for frozen weights.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_PACKED_DTYPES = (torch.bfloat16, torch.float32)
_PACKING_ROWS = 16  # oneDNN asks for a batch size to pack for; the layout it picks does not depend on it here


class Linear:
    """Holds W [out, in] (packed or plain) and an optional b [out], both of one dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = weight.device.type == "cpu" and weight.dtype in _PACKED_DTYPES and _can_pack()
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_ROWS)
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] → [rows, out], same dtype; products are summed in float32."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return functional.linear(x, self.weight, self.bias)


def _can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
