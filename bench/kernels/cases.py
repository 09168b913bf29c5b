"""What is measured, the most important first: the time may not suffice for all. Pure.

The heads of Llama 3 8B and the shapes are those of the targets; the others show what a block size, a window, a split or
a narrower cache costs or brings. On a CPU the shapes are those of SmolLM2-135M, which is what is served there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.kernels.work import (
    Heads,
    ModelShape,
    Work,
    attention_work,
    copy_blocks_work,
    decode_step_work,
    elementwise_work,
    gemm_work,
    slot_mapping_work,
    write_kv_work,
)

LLAMA_8B = ModelShape("Llama 3 8B", 32, 4096, 14336, Heads(32, 8, 128), 128256, tied=False)
SMOLLM2 = ModelShape("SmolLM2 135M", 30, 576, 1536, Heads(9, 3, 64), 49152, tied=True)


@dataclass(frozen=True)
class Target:
    """Microseconds on an H200: what a first version should reach, and a good one."""

    first_us: float
    good_us: float


@dataclass(frozen=True)
class TileChoice:
    """Rows, keys, warps and pipeline stages of a tile of the Triton kernel, to be tried instead of the table's."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int

    @property
    def for_decode(self) -> bool:
        """Else for prefill: matrix units take 64 rows there, and decode has but one token's."""
        return self.block_m < 64

    def __str__(self) -> str:
        return f"{self.block_m}x{self.tile} w{self.num_warps} s{self.num_stages}"


@dataclass(frozen=True)
class AttentionCase:
    """Attention of one layer. block_size: slots of a page; kv_dtype: of the cache; split_size: keys of a split."""

    name: str
    heads: Heads
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: int | None = None
    split_size: int | None = None  # None: the backend's own
    tiles: TileChoice | None = None  # likewise
    target: Target | None = None

    kind = "attention"

    @property
    def work(self) -> Work:
        return attention_work(self.heads, self.query_lens, self.seq_lens, self.window, self.dtype, self.kv_dtype)


@dataclass(frozen=True)
class WriteKVCase:
    """K and V of a step put into their slots, one layer."""

    name: str
    heads: Heads
    num_tokens: int
    block_size: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    target: Target | None = None

    kind = "write_kv"

    @property
    def work(self) -> Work:
        return write_kv_work(self.num_tokens, self.heads, self.dtype, self.kv_dtype)


@dataclass(frozen=True)
class CopyBlocksCase:
    """Whole blocks copied in the caches of `num_layers` layers."""

    name: str
    heads: Heads
    num_blocks: int
    num_layers: int
    block_size: int
    dtype: str = "bfloat16"
    target: Target | None = None

    kind = "copy_blocks"

    @property
    def work(self) -> Work:
        return copy_blocks_work(self.num_blocks, 2 * self.num_layers, self.block_size, self.heads, self.dtype)


@dataclass(frozen=True)
class GemmCase:
    """A linear layer of a model."""

    name: str
    rows: int
    inputs: int
    outputs: int
    dtype: str = "bfloat16"
    target: Target | None = None

    kind = "gemm"

    @property
    def work(self) -> Work:
        return gemm_work(self.rows, self.inputs, self.outputs, self.dtype)


@dataclass(frozen=True)
class DecodeStepCase:
    """A whole step of a worker, random weights: one token for each of `batch` sequences of `seq_len` tokens."""

    name: str
    model: ModelShape
    batch: int
    seq_len: int
    block_size: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    eager: bool = False  # on a GPU: every kernel launched, no recorded step replayed
    target: Target | None = None

    kind = "decode_step"

    @property
    def work(self) -> Work:
        return decode_step_work(self.model, self.batch, self.seq_len, self.dtype, self.kv_dtype)


@dataclass(frozen=True)
class SlotMappingCase:
    """The slots of a step's tokens, worked out on the device from the block tables of one cache group."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int
    dtype: str = "float32"  # of nothing: its arithmetic is of integers
    target: Target | None = None

    kind = "slot_mapping"

    @property
    def work(self) -> Work:
        return slot_mapping_work(sum(self.query_lens), len(self.seq_lens))


@dataclass(frozen=True)
class ElementwiseCase:
    """What stands between the matrix products of a layer. op: add_norm, silu_and_mul or rotate_and_write_kv."""

    name: str
    op: str
    model: ModelShape
    rows: int
    dtype: str = "bfloat16"
    target: Target | None = None

    kind = "elementwise"

    @property
    def work(self) -> Work:
        return elementwise_work(self.op, self.model, self.rows, self.dtype)


Case = AttentionCase | WriteKVCase | CopyBlocksCase | GemmCase | DecodeStepCase | SlotMappingCase | ElementwiseCase

EXPECTED_S = {
    "attention": 8.0, "write_kv": 3.0, "copy_blocks": 3.0, "slot_mapping": 3.0, "elementwise": 3.0, "gemm": 2.0,
    "decode_step": 60.0,
}  # fmt: skip
"""Seconds that a case of a kind takes on a GPU, compiling included, until the run itself has shown better."""


def decode(batch: int, seq_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (1,) * batch, (seq_len,) * batch


def chunk_among_decodes(chunk: int, context: int, batch: int, seq_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A chunk of a prompt after `context` computed tokens, and `batch` decodes behind it."""
    return (chunk, *(1,) * batch), (context + chunk, *(seq_len,) * batch)


def cuda_cases() -> list[Case]:
    """The plan for a GPU."""
    heads, page = LLAMA_8B.heads, 64
    decode_64 = AttentionCase("decode 64 x 4096", heads, *decode(64, 4096), page, target=Target(295, 275))
    decode_1 = AttentionCase("decode 1 x 131072", heads, *decode(1, 131072), page, target=Target(150, 138))
    prefill = AttentionCase("prefill 8192", heads, (8192,), (8192,), page, target=Target(1220, 950))
    mixed = chunk_among_decodes(2048, 6144, 63, 4096)
    step = DecodeStepCase("decode step 64 x 1024, Llama 3 8B", LLAMA_8B, 64, 1024, page)
    narrow = replace(decode_64, name="decode 64 x 4096, fp8 cache", kv_dtype="fp8_e4m3", target=Target(190, 155))
    cases: list[Case] = [
        decode_64,
        decode_1,
        prefill,
        AttentionCase("decode 256 x 1024", heads, *decode(256, 1024), page, target=Target(300, 278)),
        AttentionCase("chunk 2048 after 6144, 63 decodes x 4096", heads, *mixed, page, target=Target(560, 430)),
        narrow,
        step,
    ]
    cases += [replace(decode_64, name=f"{decode_64.name}, blocks of {b}", block_size=b) for b in (16, 128, 32, 256)]
    cases += [
        AttentionCase(
            "chunk 2048, 63 decodes x 4096", heads, *chunk_among_decodes(2048, 0, 63, 4096), page,
            target=Target(330, 290),
        ),
        replace(prefill, name="prefill 8192, blocks of 16", block_size=16),
        AttentionCase("decode 64 x 16384, window 4096", heads, *decode(64, 16384), page, window=4096),
        AttentionCase("prefill 8192, window 4096", heads, (8192,), (8192,), page, window=4096),
        WriteKVCase("write_kv 2048 tokens", heads, 2048, page),
        replace(step, name="decode step 64 x 4096, Llama 3 8B", seq_len=4096),
        CopyBlocksCase("copy_blocks 64, 32 layers", heads, 64, 32, page),
        replace(step, name="decode step 64 x 4096, Llama 3 8B, fp8 cache", seq_len=4096, kv_dtype="fp8_e4m3"),
        replace(step, name="decode step 64 x 1024, Llama 3 8B, launched", eager=True),
        WriteKVCase("write_kv 2048 tokens, fp8 cache", heads, 2048, page, kv_dtype="fp8_e4m3"),
        SlotMappingCase("slot_mapping of that chunk and its decodes", *mixed, page),
        WriteKVCase("write_kv 64 tokens", heads, 64, page),
    ]  # fmt: skip
    cases += [
        ElementwiseCase(f"{op} {rows} rows, Llama 3 8B", op, LLAMA_8B, rows)
        for rows in (64, 2048)
        for op in ("add_norm", "rotate_and_write_kv", "silu_and_mul")
    ]
    for case in (decode_1, decode_64):
        cases += [replace(case, name=f"{case.name}, splits of {n}", split_size=n) for n in (512, 1024, 4096, 8192)]
    cases += [
        GemmCase(f"{name} {rows} rows, Llama 3 8B", rows, *shape)
        for rows in (64, 2048)
        for name, shape in LLAMA_8B.gemms().items()
    ]
    cases += [
        AttentionCase("decode 64 x 2048, SmolLM2 heads", SMOLLM2.heads, *decode(64, 2048), 16),
        AttentionCase("prefill 2048, SmolLM2 heads", SMOLLM2.heads, (2048,), (2048,), 16),
    ]
    return cases


DECODE_TILES = tuple(
    TileChoice(16, tile, warps, stages)
    for tile, warps, stages in (
        (64, 4, 2), (64, 4, 3), (64, 4, 4), (32, 4, 3), (32, 4, 4), (16, 4, 3), (16, 4, 4), (64, 8, 3), (128, 8, 2),
        (128, 8, 3), (32, 2, 4), (16, 2, 5),
    )
)  # fmt: skip
PREFILL_TILES = tuple(
    TileChoice(rows, tile, warps, stages)
    for rows, tile, warps, stages in (
        (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (128, 32, 8, 3),
        (64, 32, 4, 4), (128, 64, 8, 4),
    )
)  # fmt: skip
"""Those that compile for sm_90 at head size 128 with few spills or none; the clock decides."""


def tile_cases() -> list[Case]:
    """Tiles of the Triton kernel tried one by one, on the shapes of the targets: what a second run on a GPU is for."""
    named = {case.name: case for case in cuda_cases() if isinstance(case, AttentionCase)}
    tried = [
        *((named["decode 64 x 4096"], choice, page) for page in (64, 16) for choice in DECODE_TILES),
        *((named["prefill 8192"], choice, page) for page in (64, 16) for choice in PREFILL_TILES),
        *((named["decode 1 x 131072"], choice, 64) for choice in DECODE_TILES),
        *((named["decode 64 x 4096, fp8 cache"], choice, 64) for choice in DECODE_TILES),
    ]
    return [
        replace(case, name=f"{case.name}, blocks of {page}, tiles {choice}", block_size=page, tiles=choice)
        for case, choice, page in tried
    ]


def cpu_cases() -> list[Case]:
    """What a CPU can show: the shapes of the model that is served there by default."""
    heads, page = SMOLLM2.heads, 16
    decode_16 = AttentionCase("decode 16 x 512", heads, *decode(16, 512), page)
    prefill = AttentionCase("prefill 512", heads, (512,), (512,), page)
    cases: list[Case] = [
        decode_16,
        prefill,
        AttentionCase("chunk 256 after 768, 15 decodes x 512", heads, *chunk_among_decodes(256, 768, 15, 512), page),
        AttentionCase("decode 1 x 8192", heads, *decode(1, 8192), page),
        replace(decode_16, name=f"{decode_16.name}, float32", dtype="float32", kv_dtype="float32"),
    ]
    cases += [
        GemmCase(f"{name} {rows} rows", rows, *shape)
        for rows in (1, 16, 256)
        for name, shape in SMOLLM2.gemms().items()
        if name != "head" or rows < 256  # only rows that sample go through the head
    ]
    cases += [
        DecodeStepCase("decode step 16 x 512, SmolLM2 135M", SMOLLM2, 16, 512, page),
        AttentionCase("decode 64 x 512", heads, *decode(64, 512), page),
        *(replace(decode_16, name=f"{decode_16.name}, blocks of {b}", block_size=b) for b in (32, 64, 256)),
        AttentionCase("decode 16 x 2048, window 512", heads, *decode(16, 2048), page, window=512),
        replace(prefill, name=f"{prefill.name}, float32", dtype="float32", kv_dtype="float32"),
        WriteKVCase("write_kv 512 tokens", heads, 512, page),
        WriteKVCase("write_kv 16 tokens", heads, 16, page),
        *(
            ElementwiseCase(f"{op} {rows} rows", op, SMOLLM2, rows)
            for rows in (16, 256)
            for op in ("add_norm", "silu_and_mul")
        ),
        CopyBlocksCase("copy_blocks 16, 30 layers", heads, 16, 30, page),
        AttentionCase("decode 8 x 2048, Llama 3 8B heads", LLAMA_8B.heads, *decode(8, 2048), page),
    ]
    cases += [
        GemmCase(f"{name} {rows} rows, float32", rows, *shape, dtype="float32")
        for rows in (1, 16, 256)
        for name, shape in SMOLLM2.gemms().items()
        if name != "head" or rows < 256
    ]
    return cases
