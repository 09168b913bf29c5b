"""The tensors of a model folder's safetensors files, or seeded random ones in their place. Knows no architecture.

A model says which tensors it expects (name → shape), a source is checked against that as a whole before anything is
read, and then tensors are taken one at a time, so that no second copy of the model is ever in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_NOT_WEIGHTS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Endings of buffers that old checkpoints carry along and that are computed here."""

_DRAWN = 1_000_003
"""Random numbers that a dummy tensor is made of, over and over: drawing 8 billion takes a minute. A prime, so that the
rows of a matrix differ."""


class WeightError(ValueError):
    """The files do not hold the tensors of this model; the message names them."""


class WeightSource(Protocol):
    """Where a model takes its tensors from."""

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise WeightError unless there is exactly what is expected: no name missing, none left, no other shape."""
        ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor on the CPU in the dtype it is stored in."""
        ...


def open_weights(
    folder: str | Path,
    *,
    load_format: str = "auto",
    seed: int = 0,
    on_bytes: Callable[[int], None] = lambda done: None,
) -> WeightSource:
    """The source for a folder; load_format "dummy" reads no file. on_bytes(bytes read so far). Raises WeightError."""
    if load_format == "dummy":
        return DummyWeights(seed)
    if load_format != "auto":
        raise ValueError(f"load_format must be auto or dummy, not {load_format!r}")
    return FolderWeights(folder, on_bytes=on_bytes)


class FolderWeights:
    """All safetensors files of a folder, memory-mapped; with an index file, those that it names."""

    def __init__(self, folder: str | Path, *, on_bytes: Callable[[int], None] = lambda done: None) -> None:
        self.folder = Path(folder)
        self.on_bytes = on_bytes
        self.bytes_read = 0
        self._file_of: dict[str, Path] = {}
        self._open_files = {}
        for path in _files(self.folder):
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise WeightError(f"{path} is no readable safetensors file: {error}") from None
            self._open_files[path] = file
            for name in file.keys():  # noqa: SIM118 (no mapping)
                self._file_of[name] = path
        if not self._open_files:
            raise WeightError(f"{self.folder} holds no weights: there is no *.safetensors file in it")

    @property
    def total_bytes(self) -> int:
        """The size of all files: what on_bytes counts up to, about."""
        return sum(path.stat().st_size for path in self._open_files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open_files[self._file_of[name]].get_slice(name).get_shape())

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        missing = [name for name in expected if name not in self._file_of]
        if missing:
            raise WeightError(f"{self.folder} lacks {_some(missing)}")
        unexpected = [name for name in self._file_of if name not in expected and not name.endswith(_NOT_WEIGHTS)]
        if "lm_head.weight" in unexpected and "model.embed_tokens.weight" in expected:
            unexpected.remove("lm_head.weight")  # a copy of the embedding, to which config.json ties it
        if unexpected:
            raise WeightError(f"{self.folder} holds tensors that this model has not: {_some(unexpected)}")
        for name, shape in expected.items():
            if self.shape(name) != tuple(shape):
                raise WeightError(f"{name} in {self.folder} has the shape {self.shape(name)}, expected {tuple(shape)}")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._file_of:
            raise WeightError(f"{self.folder} lacks {name}")
        tensor: Tensor = self._open_files[self._file_of[name]].get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise WeightError(f"{name} in {self.folder} has the shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        if not tensor.is_floating_point():
            raise WeightError(f"{name} in {self.folder} is {tensor.dtype}; quantised weights are not supported")
        self.bytes_read += tensor.nbytes
        self.on_bytes(self.bytes_read)
        return tensor


class DummyWeights:
    """Random weights that depend on seed and name only, bfloat16. Norm weights are 1, so activations stay sane."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Whatever is expected is there."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        size = math.prod(shape)
        drawn = torch.randn(min(size, _DRAWN), generator=generator).mul_(0.02).bfloat16()
        return drawn.repeat(-(-size // _DRAWN))[:size].view(shape)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{index} is no readable index of safetensors files: {error!r}") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise WeightError(f"{folder} lacks the files {_some(missing)}, which its index names")
    return [folder / name for name in names]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
