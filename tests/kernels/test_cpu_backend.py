"""The cpu backend's own promises: it refuses what it cannot address, compiles once, and caches where it may."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from paged_world import bits, make_queries, make_world

from kernels.cpu import jit
from kernels.cpu.backend import CpuBackend
from kernels.cpu.cache_ops import write_rows
from kernels.cpu.plan import plan_items
from kernels.cpu.tiles import row_from_float
from kernels.cpu.vectors import BF16, F16, exp2, load_f32, store_f32, tanh_half


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(num_threads=1)


@pytest.mark.parametrize("block", [10**9, -1])
def test_a_block_id_out_of_the_cache_is_refused(cpu: CpuBackend, block: int) -> None:
    world = make_world([5, 20], heads=(2, 1), head_dim=32, block_size=8, dtype=torch.float32)
    metadata = world.metadata([1, 1])
    metadata.block_table[1, 1] = block
    with pytest.raises(ValueError, match="sequence 1 names a block outside"):
        world.attend(cpu, make_queries(world, 2), metadata)


def test_lengths_beyond_the_table_or_the_step_are_refused(cpu: CpuBackend) -> None:
    world = make_world([5, 20], heads=(2, 1), head_dim=32, block_size=8, dtype=torch.float32)
    for change in ("seq_lens", "query_start_loc"):
        metadata = world.metadata([1, 1])
        getattr(metadata, change)[-1] = 10**6
        with pytest.raises(ValueError, match=r"sequence 1 .*more tokens"):
            world.attend(cpu, make_queries(world, 2), metadata)


@pytest.mark.parametrize("slot", [16, -2])
def test_a_slot_out_of_the_cache_is_refused(cpu: CpuBackend, slot: int) -> None:
    cache = torch.zeros((2, 1, 8, 16))
    k = torch.ones((2, 1, 16))
    with pytest.raises(ValueError, match=f"token 1 has slot {slot}; the cache has 16"):
        cpu.write_kv(k, k, cache, cache.clone(), torch.tensor([9, slot]))


def test_a_head_size_or_dtype_it_lacks_is_refused(cpu: CpuBackend) -> None:
    world = make_world([5], heads=(2, 1), head_dim=24, block_size=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="multiple of 16, not 24"):
        world.attend(cpu, make_queries(world, 1), world.metadata([1]))
    world = make_world([5], heads=(2, 1), head_dim=32, block_size=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="alike"):
        world.attend(cpu, make_queries(world, 1).bfloat16(), world.metadata([1]))


def test_after_warm_up_no_shape_is_compiled(cpu: CpuBackend) -> None:
    backend = CpuBackend(num_threads=2)
    backend.warm_up(num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    assert set(backend.counters.values()) == {0}
    compiled = [list(kernel.overloads) for kernel in (plan_items, write_rows)]
    for dtype, head_dim, window, soft_cap in [(torch.float32, 128, None, None), (torch.float16, 80, 9, 5.0)]:
        world = make_world(
            [70, 3], heads=(6, 2), head_dim=head_dim, block_size=24, dtype=dtype, window=window, soft_cap=soft_cap
        )
        out = world.attend(backend, make_queries(world, 71), world.metadata([70, 1]))
        assert not out.isnan().any()
        angles, weight = torch.zeros((3, head_dim)), torch.ones(head_dim)
        qkv, token = torch.zeros((1, 10 * head_dim), dtype=dtype), torch.zeros(1, dtype=torch.int64)
        backend.rotate_and_write_kv(
            qkv, 6, token, angles, world.k_cache, world.v_cache, token - 1, q_norm=weight, k_norm=weight
        )
    assert [list(kernel.overloads) for kernel in (plan_items, write_rows)] == compiled, (
        "what is not called by its address"
    )
    assert [len(signatures) for signatures in compiled] == [1, 1]
    backend.close()


def test_exp2_and_tanh_to_the_last_bits() -> None:
    @jit.part
    def evaluate(source, exponentials, tangents, count):
        for n in range(0, count, 16):
            store_f32(exponentials + 4 * n, exp2(load_f32(source + 4 * n)))
            store_f32(tangents + 4 * n, tanh_half(load_f32(source + 4 * n)))

    x = np.concatenate([np.linspace(-126, 126, 40_000), np.linspace(-1, 1, 40_000)]).astype(np.float32)
    x = np.concatenate([x, np.array([-np.inf, -200, 0, np.nan] * 4, dtype=np.float32)])
    powers, tangents = np.empty_like(x), np.empty_like(x)
    evaluate(x.ctypes.data, powers.ctypes.data, tangents.ctypes.data, x.size)
    exact = np.exp2(x[:-16].astype(np.float64))
    assert np.abs(powers[:-16] / exact - 1).max() < 2e-7
    assert np.abs(tangents[:-16] - np.tanh(x[:-16].astype(np.float64) / (2 * np.log2(np.e)))).max() < 2e-7
    np.testing.assert_array_equal(powers[-4:], np.array([0, 0, 1, np.nan], dtype=np.float32))


@pytest.mark.parametrize(("kind", "dtype"), [(BF16, torch.bfloat16), (F16, torch.float16)])
def test_results_are_rounded_as_pytorch_rounds(kind: int, dtype: torch.dtype) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32) << 16  # every bfloat16, then ties, then just off a tie
    values = torch.cat([patterns, patterns | 0x8000, patterns | 0x8001, patterns | 0x7FFF]).view(torch.float32)
    values = values[~values.isnan()]
    values = torch.cat([values, torch.full((values.numel() % 16 or 16,), float("nan"))])
    values = values[: values.numel() // 16 * 16].contiguous()
    rounded = torch.empty(values.shape, dtype=dtype)
    row_from_float(values.data_ptr(), rounded.data_ptr(), values.numel(), kind, np.float32(1.0))
    expected = values.to(dtype)
    is_nan = expected.isnan()
    assert torch.equal(rounded.isnan(), is_nan)
    assert torch.equal(bits(rounded)[~is_nan], bits(expected)[~is_nan])


def test_the_compile_cache_goes_where_it_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NUMBA_CACHE_DIR, else the user's cache folder, else a temporary one; never the source folder."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "asked"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert jit._cache_dir().parent == tmp_path / "asked"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert jit._cache_dir().parent == tmp_path / "user" / "pageplane" / "numba"
    (tmp_path / "file").touch()  # no folder can be made below a file
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    fallback = jit._cache_dir()
    assert fallback.is_dir()
    assert fallback.name.startswith("pageplane-numba-")
    fallback.rmdir()
