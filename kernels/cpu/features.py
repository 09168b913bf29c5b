"""What this processor multiplies with, of what the kernels know to use."""

from __future__ import annotations

import llvmlite.binding as llvm

_FEATURES = llvm.get_host_cpu_features()

HAS_AVX512 = bool(_FEATURES.get("avx512f", False))
HAS_VNNI = HAS_AVX512 and bool(_FEATURES.get("avx512vnni", False))
"""Four unsigned bytes times four signed ones, summed into int32."""
HAS_BF16_DOTS = HAS_AVX512 and bool(_FEATURES.get("avx512bf16", False))
"""Two bfloat16 times two others, summed into float32."""
