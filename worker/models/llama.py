"""The Llama family: Llama, Mistral, Qwen2 and Qwen3 differ in biases, head norms and windows, all told by the config.

A step's tokens, of whatever sequences, come packed as [T]; only attention knows where one sequence ends and
the next begins, from the metadata. Tensor names are Hugging Face's. Sources: Touvron et al. 2023 (LLaMA), Jiang et al.
2023 (Mistral), transformers' modeling files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backend import AttentionBackend, replay_of, team_of
from kernels.fusion import rotate_and_write_kv_of
from kernels.metadata import AttentionMetadata
from protocol.model_config import ModelConfig
from worker.layers.head import OutputHead
from worker.layers.linear import LinearLayer
from worker.layers.ops import make_ops
from worker.layers.quantization import (
    QuantizationUnavailable,
    chain,
    has_cpu_layers,
    make_gated,
    make_linear,
    why_unavailable,
)
from worker.layers.rope import rope_table
from worker.models.recorded import RecordedLayers
from worker.weights import WeightSource

if TYPE_CHECKING:
    from kernels.cpu.team import Team

KVCache = tuple[Tensor, ...]
"""K and V of one layer, each [num_blocks, Hkv, block_size, D]; if quantised, their scales, each float32 [Hkv]."""


class LlamaModel:
    """Embedding, decoder layers, final norm, output head. Weights, K and V are `dtype`, the residual stream is float32.

    What enters a matrix product is `activation_dtype`: float32 on a CPU, whose layers sum in float32 anyway.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int,
        quantization: str = "none",
        team: Team | None = None,
    ) -> None:
        """quantization: "none", or "int8": 8-bit weights and activations in all matrix products but attention's.
        team: the threads that compute a CPU's layers; None: as many as PyTorch uses.

        Raises QuantizationUnavailable.
        """
        if quantization != "none" and (reason := why_unavailable(device, dtype)) is not None:
            raise QuantizationUnavailable(reason)
        self.quantization = quantization
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self._weights: WeightSource | None = weights
        self._shapes = self.tensor_shapes(config)
        cpu_layers = has_cpu_layers(device, dtype)
        self.activation_dtype = torch.float32 if cpu_layers else dtype
        self.team = (team or _team()) if cpu_layers else None
        self.ops = make_ops(self.activation_dtype, device, self.team)
        self._recorded: RecordedLayers | None = None
        self.rope = rope_table(config, max_positions, device)  # float32 [max_positions, D]
        self.embedding = self._load("model.embed_tokens.weight")  # [V, H]
        self.layers = [DecoderLayer(self, index) for index in range(config.num_layers)]
        self.norm = self._load("model.norm.weight").float()
        head = self.embedding if config.tie_word_embeddings else self._load("lm_head.weight")
        self.lm_head = OutputHead(head, quantization=quantization, team=self.team)
        in_order = [step for layer in self.layers for step in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        chain([*in_order, self.lm_head.linear])
        self._weights = None  # closes the files

    @staticmethod
    def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of this model's files."""
        hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_heads * head, config.num_kv_heads * head
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
        for index in range(config.num_layers):
            layer = f"model.layers.{index}."
            linears = {
                "self_attn.q_proj": (q, hidden, config.qkv_bias),
                "self_attn.k_proj": (kv, hidden, config.qkv_bias),
                "self_attn.v_proj": (kv, hidden, config.qkv_bias),
                "self_attn.o_proj": (hidden, q, config.o_bias),
                "mlp.gate_proj": (inner, hidden, config.mlp_bias),
                "mlp.up_proj": (inner, hidden, config.mlp_bias),
                "mlp.down_proj": (hidden, inner, config.mlp_bias),
            }
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{layer}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (rows,)
            shapes[f"{layer}input_layernorm.weight"] = (hidden,)
            shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
            if config.qk_norm:
                shapes[f"{layer}self_attn.q_norm.weight"] = (head,)
                shapes[f"{layer}self_attn.k_norm.weight"] = (head,)
        shapes["model.norm.weight"] = (hidden,)
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        return shapes

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
        backend: AttentionBackend,
    ) -> Tensor:
        """One step: writes the K/V of its tokens into the caches and returns activation_dtype [T, H], after the final
        norm.

        input_ids: int32 or int64 [T]; positions: int64 [T]; kv_caches and metadata: one per layer (the layers of a
        cache group share their metadata). In each layer the K/V of all tokens are written before any token attends.
        """
        if positions.dtype is not torch.int64 or positions.shape != input_ids.shape or not positions.is_contiguous():
            raise ValueError(f"positions must be contiguous int64 like input_ids, not {positions.dtype}")
        residual = self.memory("residual", (len(input_ids), self.config.hidden_size), torch.float32)
        residual.copy_(functional.embedding(input_ids, self.embedding))
        replay, team = replay_of(backend), self.team
        if replay is None or team is None or not self._recordable(kv_caches, metadata, backend):
            return self._forward(residual, positions, kv_caches, metadata, backend, 0).clone()
        # All of a step's layers are told the same, so the first says what there is to say, and the others are played.
        self.layers[0].forward(residual, None, positions, kv_caches[0], metadata[0], backend)
        recorded = self._recorded
        if recorded is None or not recorded.serves(residual, kv_caches, backend):
            recorded = self._recorded = RecordedLayers.record(
                team, residual, kv_caches, backend,
                lambda: self._forward(residual, positions, kv_caches, metadata, backend, 1),
            )  # fmt: skip
        else:
            replay(recorded.tape, len(residual))
        return recorded.hidden[: len(residual)].clone()

    def _forward(
        self,
        residual: Tensor,
        positions: Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
        backend: AttentionBackend,
        first: int,
    ) -> Tensor:
        """From layer `first` on, with all updates in the residual; the result is overwritten by the next call."""
        update: Tensor | None = None
        for layer, cache, layer_metadata in list(zip(self.layers, kv_caches, metadata, strict=True))[first:]:
            update = layer.forward(residual, update, positions, cache, layer_metadata, backend)
        return self.ops.add_norm(residual, update, self.norm, self.config.rms_norm_eps)

    def _recordable(
        self, kv_caches: Sequence[KVCache], metadata: Sequence[AttentionMetadata], backend: AttentionBackend
    ) -> bool:
        """Whether all that this step's layers compute is work of one team, and one cache group's."""
        return (
            team_of(backend) is self.team
            and len(kv_caches[0]) == 2
            and all(of_layer is metadata[0] for of_layer in metadata)
        )

    def memory(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """A tensor, not initialised; on a CPU its memory is what the same name had before, unless that is too small."""
        if self.team is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self.team.memory(name, dtype, shape[0] * shape[1]).view(shape)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden activation_dtype [R, H], the rows that sample → float32 [R, V]."""
        return self.lm_head(hidden)

    def _load(self, name: str) -> Tensor:
        assert self._weights is not None, "weights are loaded once"
        return self._weights.take(name, self._shapes[name]).to(device=self.device, dtype=self.dtype)

    def _load_stacked(self, prefix: str, *names: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the linear layers of these names as one, stacked by their outputs."""
        weights = [self._load(f"{prefix}{name}.weight") for name in names]
        biases = [self._load(f"{prefix}{name}.bias") for name in names if f"{prefix}{name}.bias" in self._shapes]
        return torch.cat(weights), torch.cat(biases) if biases else None

    def _load_linear(self, prefix: str, *names: str, sensitive: bool = False, keep_out: bool = True) -> LinearLayer:
        weight, bias = self._load_stacked(prefix, *names)
        return make_linear(
            weight, bias, quantization=self.quantization, sensitive=sensitive, team=self.team, keep_out=keep_out
        )

    def _load_gated(self, prefix: str, gate: str, up: str) -> Callable[[Tensor], Tensor]:
        weight, bias = self._load_stacked(prefix, gate, up)
        return make_gated(
            weight, bias, self.ops, quantization=self.quantization, team=self.team, out_dtype=self.activation_dtype
        )


def _team() -> Team:
    """As many threads as PyTorch uses."""
    from kernels.cpu.team import Team  # loads Numba

    return Team(torch.get_num_threads())


class DecoderLayer:
    """Attention, then the gated MLP, each after an RMSNorm and added to the residual stream."""

    def __init__(self, model: LlamaModel, index: int) -> None:
        config = model.config
        prefix = f"model.layers.{index}."
        self.memory = model.memory
        self.ops = model.ops
        self.rope = model.rope
        self.eps = config.rms_norm_eps
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = (config.layer_windows[index] or None) if config.layer_windows else None
        attention = prefix + "self_attn."
        self.qkv = model._load_linear(attention, "q_proj", "k_proj", "v_proj", sensitive=True, keep_out=False)
        self.output = model._load_linear(attention, "o_proj")
        self.gate_up = model._load_gated(prefix + "mlp.", "gate_proj", "up_proj")
        self.down = model._load_linear(prefix + "mlp.", "down_proj", sensitive=True)
        self.attention_norm = model._load(prefix + "input_layernorm.weight").float()
        self.mlp_norm = model._load(prefix + "post_attention_layernorm.weight").float()
        self.q_norm = model._load(attention + "q_norm.weight").float() if config.qk_norm else None
        self.k_norm = model._load(attention + "k_norm.weight").float() if config.qk_norm else None

    def forward(
        self,
        residual: Tensor,
        update: Tensor | None,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        backend: AttentionBackend,
    ) -> Tensor | None:
        """residual float32 [T, H], still without the `update` [T, H] of the layer before, if there is one → this
        layer's update, or None if the residual has it."""
        hidden = self.ops.add_norm(residual, update, self.attention_norm, self.eps)
        attended = self._attend(hidden, positions, kv_cache, metadata, backend)
        hidden = self.ops.add_norm(residual, self.output.add_to(residual, attended), self.mlp_norm, self.eps)
        return self.down.add_to(residual, self.gate_up(hidden))

    def _attend(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        backend: AttentionBackend,
    ) -> Tensor:
        """hidden [T, H] → what the heads gathered, [T, Hq * D]."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(hidden)  # [T, (Hq + 2 Hkv) * D]
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        k_cache, v_cache, *scales = kv_cache
        k_scale, v_scale = scales or (None, None)
        rotate_and_write_kv = rotate_and_write_kv_of(backend)
        if rotate_and_write_kv is not None:
            rotate_and_write_kv(
                qkv, num_heads, positions, self.rope, k_cache, v_cache, metadata.slot_mapping,
                q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps, k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
        else:
            if self.q_norm is not None and self.k_norm is not None:
                self.ops.norm_heads(qkv, 0, num_heads, self.q_norm, self.eps)
                self.ops.norm_heads(qkv, num_heads, num_kv_heads, self.k_norm, self.eps)
            self.ops.rotate(qkv, num_heads + num_kv_heads, positions, self.rope)
            backend.write_kv(k, v, k_cache, v_cache, metadata.slot_mapping, k_scale, v_scale)
        out = self.memory("attended", (q.shape[0], num_heads * self.head_dim), q.dtype).view(q.shape)
        backend.paged_attention(
            q, k_cache, v_cache, metadata,
            scale=self.scale, window=self.window, k_scale=k_scale, v_scale=v_scale, out=out,
        )  # fmt: skip
        return out.view(out.shape[0], -1)
