"""The served model as `transformers` has it, for tests that compare what the gateway says with its logits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration import oracle


@cache
def _model(folder: str) -> Any:
    return oracle.load(Path(folder))


def logits_of(folder: str, tokens: list[int]) -> np.ndarray:
    """float32 [n, V]: after each token."""
    import torch

    with torch.inference_mode():
        logits: np.ndarray = _model(folder)(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return logits


def logprobs_of(folder: str, tokens: list[int]) -> np.ndarray:
    """float64 [n, V]: log-probabilities of what comes after each token."""
    wide = logits_of(folder, tokens).astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
