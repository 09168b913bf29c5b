"""The compiled attention kernel at the shapes that are measured: right, and the same to the bit whatever is around it.

The sweep over small shapes is the one of tests/kernels, which runs on the GPU where there is one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.kernels.attention import Inputs, dense_calls, has_dense_form, make_inputs
from bench.kernels.cases import LLAMA_8B, AttentionCase, chunk_among_decodes, decode
from bench.kernels.device import relative_error
from kernels.backend import AttentionBackend
from kernels.metadata import AttentionMetadata
from kernels.registry import find

DEVICE = torch.device("cuda")
HEADS = LLAMA_8B.heads
SHAPES = [
    AttentionCase("decode", HEADS, *decode(5, 3000), 64),
    AttentionCase("one long decode, many splits", HEADS, *decode(1, 40000), 64),
    AttentionCase("prefill", HEADS, (1500,), (1500,), 64),
    AttentionCase("chunk after context, among decodes", HEADS, *chunk_among_decodes(700, 2500, 7, 2100), 64),
    AttentionCase("decode in a window", HEADS, *decode(5, 5000), 64, window=1000),
    *(AttentionCase(f"blocks of {b}", HEADS, *chunk_among_decodes(130, 70, 3, 1000), b) for b in (8, 16, 32, 48, 256)),
    *(
        AttentionCase(f"{kv} cache", HEADS, *chunk_among_decodes(700, 2500, 7, 2100), 64, kv_dtype=kv)
        for kv in ("fp8_e4m3", "int8")
    ),
    AttentionCase("float16", HEADS, *chunk_among_decodes(130, 70, 3, 1000), 16, "float16", "float16"),
    AttentionCase("float32", HEADS, *chunk_among_decodes(130, 70, 3, 1000), 16, "float32", "float32"),
]


@pytest.fixture(scope="module")
def triton() -> AttentionBackend:
    return find("triton").load(None)


def attend(
    backend: AttentionBackend, case: AttentionCase, inputs: Inputs, metadata: AttentionMetadata, q: Tensor
) -> Tensor:
    out = torch.full_like(q, float("nan"))
    backend.paged_attention(
        q, inputs.k_cache, inputs.v_cache, metadata, scale=HEADS.head_dim**-0.5, window=case.window,
        k_scale=inputs.k_scale, v_scale=inputs.v_scale, out=out,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_attention_is_that_of_torch_in_float32(triton: AttentionBackend, case: AttentionCase) -> None:
    assert has_dense_form(case)
    inputs = make_inputs(case, DEVICE, seed=1)
    out = attend(triton, case, inputs, inputs.metadata, inputs.q)
    expected = torch.cat([part() for part in dense_calls(case, replace(inputs, q=inputs.q.float()))])
    assert relative_error(out, expected) < {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-5}[case.dtype]


@pytest.mark.parametrize("case", SHAPES[:5], ids=lambda case: case.name)
def test_twenty_runs_have_the_same_bits(triton: AttentionBackend, case: AttentionCase) -> None:
    inputs = make_inputs(case, DEVICE, seed=2)
    first = attend(triton, case, inputs, inputs.metadata, inputs.q)
    for _ in range(20):
        assert torch.equal(attend(triton, case, inputs, inputs.metadata, inputs.q), first)


def test_a_sequence_has_the_same_bits_alone_and_among_others(triton: AttentionBackend) -> None:
    """Decodes of many lengths, split and not split, beside a chunk of a prompt."""
    seq_lens = (900, 40000, 1, 2048, 2049, 6000, 64)
    query_lens = (300, *(1,) * 6)
    case = AttentionCase("all", HEADS, query_lens, seq_lens, 16)
    inputs = make_inputs(case, DEVICE, seed=3)
    together = attend(triton, case, inputs, inputs.metadata, inputs.q).split(query_lens)
    starts = inputs.metadata.query_start_loc.tolist()
    for seq, expected in enumerate(together):
        table = inputs.metadata.block_table[seq].tolist()
        alone = AttentionMetadata.build([query_lens[seq]], [seq_lens[seq]], [table], case.block_size, DEVICE)
        q = inputs.q[starts[seq] : starts[seq + 1]]
        assert torch.equal(attend(triton, case, inputs, alone, q), expected), f"sequence {seq}"


@pytest.mark.parametrize("case", [SHAPES[0], SHAPES[1], SHAPES[3]], ids=lambda case: case.name)
def test_a_recorded_launch_computes_anew_what_now_lies_there(triton: AttentionBackend, case: AttentionCase) -> None:
    inputs = make_inputs(case, DEVICE, seed=4)
    q, out = inputs.q.clone(), torch.empty_like(inputs.q)

    def launch() -> None:
        triton.paged_attention(q, inputs.k_cache, inputs.v_cache, inputs.metadata, scale=HEADS.head_dim**-0.5, out=out)

    launch()  # compiles and plans: neither may be recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for factor in (1.0, -0.5, 2.0):
        q.copy_(inputs.q * factor)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, attend(triton, case, inputs, inputs.metadata, q))
