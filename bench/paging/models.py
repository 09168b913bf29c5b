"""The models that the experiments with real servers serve, and what one token costs them in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.kernels.cases import SMOLLM2
from bench.kernels.work import BYTES_OF, Heads, ModelShape

DTYPE = "bfloat16"
MAX_POSITIONS = 8192


@dataclass(frozen=True)
class ServedModel:
    """random_weights: there is no checkpoint, only its shape."""

    shape: ModelShape
    random_weights: bool

    @property
    def slot_bytes(self) -> int:
        """Of the keys and values of one token: 2 · layers · KV heads · head dim · bytes of an element."""
        heads = self.shape.heads
        return 2 * self.shape.num_layers * heads.num_kv * heads.head_dim * BYTES_OF[DTYPE]

    @property
    def weight_bytes(self) -> int:
        """Of all that a step multiplies with."""
        return self.shape.num_products * BYTES_OF[DTYPE]

    @property
    def token_ids(self) -> tuple[int, int]:
        """[low, high) of the ids that prompts are made of: above the special tokens."""
        return min(1000, self.shape.vocab // 8), self.shape.vocab - 100

    def flags(self, folder: Path) -> list[str]:
        """For launch.py; what they need is written into `folder`."""
        flags = ["--dtype", DTYPE]
        if self.random_weights:
            from bench.kernels.decode_step import write_config  # brings torch, which nothing else here needs

            write_config(self.shape, folder, MAX_POSITIONS)
            flags += ["--model", str(folder), "--load-format", "dummy"]
        return flags

    def json(self) -> dict[str, str | int]:
        return {
            "name": self.shape.name,
            "weights": "random" if self.random_weights else "its own",
            "dtype": DTYPE,
            "weight_bytes": self.weight_bytes,
            "slot_bytes": self.slot_bytes,
        }


MODELS = {
    "smollm2": ServedModel(SMOLLM2, random_weights=False),
    # so small that a step is mostly what a step costs anyway: it shows what is scheduled, within seconds
    "tiny": ServedModel(ModelShape("tiny Llama", 4, 256, 704, Heads(4, 2, 64), 4096, tied=True), random_weights=True),
}
