"""What the compiled kernels may cost: data, read by `compile_check`, printed in docs/kernels.md.

The numbers come from how many programs should share a multiprocessor. NVIDIA's have 65,536 registers: decode with tiles
of 8,192 elements of K (64 keys of 128) at 168 registers a thread leaves room for 3 programs of 4 warps, with tiles of
2,048 at 96 registers for 5. Loads are counted in bytes of one instruction, K/V buffers are those that Triton's
pipeliner keeps in shared memory. A spill goes to memory and back in the innermost loop: none is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """An architecture. shared_kib: shared memory (LDS) that one program may have at most."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_kib: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163),  # A100
        Target("sm_90", "cuda", 90, 32, 227),  # H100, H200
        Target("gfx942", "hip", "gfx942", 64, 64),  # MI300
    )
}


@dataclass(frozen=True)
class Budget:
    """registers: of a thread, at most (gfx942: vector registers, accumulation registers included). shared_kib: at most.

    kv_buffers and load_bytes: at least. matrix_units: instructions that must be there: wgmma, mma or mfma.
    """

    registers: int
    shared_kib: int
    kv_buffers: int = 0
    load_bytes: int = 0
    matrix_units: str | None = None
    spill_bytes: int = 0


@dataclass(frozen=True)
class Row:
    """The budget of variants of a kind on a target ("all": on each), with K tiles of at most so many elements."""

    target: str
    kind: str
    tile_elements: int
    budget: Budget


ANY_TILE = 1 << 30

ROWS: tuple[Row, ...] = (
    Row("sm_80", "decode", 2048, Budget(96, 24, 2, 16, "mma")),  # 5 programs of 4 warps
    Row("sm_80", "decode", 4096, Budget(128, 48, 2, 16, "mma")),  # 3, by shared memory
    Row("sm_80", "decode", ANY_TILE, Budget(168, 80, 2, 16, "mma")),  # 2, by shared memory
    Row("sm_80", "prefill", 4096, Budget(208, 54, 2, 16, "mma")),
    Row("sm_80", "prefill", ANY_TILE, Budget(255, 112, 2, 16, "mma")),
    Row("sm_80", "decode 8-bit", 2048, Budget(128, 24, 2, 8, "mma")),  # 4
    Row("sm_80", "decode 8-bit", ANY_TILE, Budget(168, 40, 2, 8, "mma")),  # 3
    Row("sm_80", "prefill 8-bit", ANY_TILE, Budget(255, 54, 2, 8, "mma")),
    Row("sm_90", "decode", 2048, Budget(96, 24, 2, 16, "mma")),  # 5
    Row("sm_90", "decode", 4096, Budget(128, 48, 2, 16, "mma")),  # 4
    Row("sm_90", "decode", ANY_TILE, Budget(168, 80, 2, 16, "mma")),  # 3; groups of more than 16: 2
    Row("sm_90", "prefill", ANY_TILE, Budget(255, 113, 2, 16, "wgmma")),  # 2 of 4 warps
    Row("sm_90", "long prefill", ANY_TILE, Budget(255, 164, 2, 16, "wgmma")),  # 1 of 8 warps
    Row("sm_90", "decode 8-bit", 2048, Budget(128, 24, 2, 8, "mma")),  # 4
    Row("sm_90", "decode 8-bit", ANY_TILE, Budget(208, 75, 2, 8, "mma")),  # 2: the widened tile is in registers
    Row("sm_90", "prefill 8-bit", ANY_TILE, Budget(255, 113, 2, 8, "wgmma")),
    Row("sm_90", "long prefill 8-bit", ANY_TILE, Budget(255, 164, 2, 8, "wgmma")),
    Row("gfx942", "decode", 1024, Budget(96, 16, 2, 8, "mfma")),  # 256 threads have 8 bytes each of such a tile
    Row("gfx942", "decode", 4096, Budget(192, 64, 2, 16, "mfma")),  # 2 waves a SIMD
    Row("gfx942", "decode", ANY_TILE, Budget(256, 64, 2, 16, "mfma")),  # 2
    Row("gfx942", "prefill", ANY_TILE, Budget(256, 64, 2, 16, "mfma")),  # 2
    Row("gfx942", "decode 8-bit", ANY_TILE, Budget(168, 64, 2, 8, "mfma")),
    Row("gfx942", "prefill 8-bit", ANY_TILE, Budget(256, 64, 2, 8, "mfma")),
    Row("all", "decode fp32", ANY_TILE, Budget(168, 96, 2, 16)),  # no matrix units: they would round to tf32
    Row("all", "decode merge", ANY_TILE, Budget(96, 8, load_bytes=16)),
    Row("all", "prefill merge", ANY_TILE, Budget(128, 8, load_bytes=16)),
    Row("all", "long prefill merge", ANY_TILE, Budget(128, 8, load_bytes=16)),
    Row("all", "write", ANY_TILE, Budget(48, 8, load_bytes=8)),
    Row("all", "slots", ANY_TILE, Budget(48, 0)),  # scattered words: there is nothing wide to load
    Row("all", "states", ANY_TILE, Budget(48, 0, load_bytes=8)),
    Row("all", "copy", ANY_TILE, Budget(64, 0, load_bytes=16)),
    Row("all", "gather", ANY_TILE, Budget(64, 8, load_bytes=8)),
    Row("all", "norm", ANY_TILE, Budget(96, 34, load_bytes=16)),
    Row("all", "heads", ANY_TILE, Budget(64, 8, load_bytes=16)),
    Row("all", "gate", ANY_TILE, Budget(48, 0, load_bytes=8)),
)


def budget_of(target: str, kind: str, tile_elements: int) -> Budget:
    """The first row that fits. Raises KeyError if there is none: no variant goes without a budget."""
    for row in ROWS:
        if row.kind == kind and row.target in (target, "all") and tile_elements <= row.tile_elements:
            return row.budget
    raise KeyError(f"no budget for {kind} on {target}")


@dataclass(frozen=True)
class Measured:
    """What a variant compiled to. load_bytes: the narrowest asynchronous copy (K and V), or the widest plain load."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    kv_buffers: int
    load_bytes: int
    matrix_units: str | None


def problems(measured: Measured, budget: Budget, target: Target) -> list[str]:
    """In what `measured` breaks its budget, in words; nothing if it keeps it."""
    found = []
    if measured.spill_bytes > budget.spill_bytes:
        found.append(f"{measured.spill_bytes} bytes spilled")
    if measured.registers > budget.registers:
        found.append(f"{measured.registers} registers, budget {budget.registers}")
    shared_kib = min(budget.shared_kib, target.shared_kib)
    if measured.shared_bytes > shared_kib * 1024:
        found.append(f"{measured.shared_bytes} bytes of shared memory, budget {shared_kib * 1024}")
    if measured.kv_buffers < budget.kv_buffers:
        found.append(f"{measured.kv_buffers} K/V buffers, at least {budget.kv_buffers} wanted")
    if measured.load_bytes < budget.load_bytes:
        found.append(f"loads of {measured.load_bytes} bytes, at least {budget.load_bytes} wanted")
    if budget.matrix_units and measured.matrix_units != budget.matrix_units:
        found.append(f"no {budget.matrix_units}" + (f", but {measured.matrix_units}" if measured.matrix_units else ""))
    return found
