"""Each mend of Triton's interpreter: with it values are right; without it, where this version has the fault, wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as upstream

from kernels.triton import interpreter

VERSION = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
FLOAT8 = torch.float8_e4m3fn


def cast_kernel(source_ptr, target_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(target_ptr + i, tl.load(source_ptr + i).to(target_ptr.dtype.element_ty))


def dot_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def loop_kernel(bounds_ptr, out_ptr):
    total = 0
    for at in range(tl.load(bounds_ptr), tl.load(bounds_ptr + 1), tl.load(bounds_ptr + 2)):
        total += at
    tl.store(out_ptr, total)


def add_kernel(a_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(a_ptr + i) + tl.load(a_ptr + i))


def interpreted(kernel: Callable[..., None], *arguments: Tensor, **constants: int) -> None:
    function: Any = upstream.InterpretedFunction(kernel)
    function[(1,)](*arguments, **constants)


def cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    padded = torch.zeros(triton.next_power_of_2(len(values)), dtype=values.dtype)
    padded[: len(values)] = values
    out = torch.zeros(len(padded), dtype=dtype)
    interpreted(cast_kernel, padded, out, N=len(padded))
    return out[: len(values)]


def floats() -> Tensor:
    """Some of every size, ties, the next exponent after a carry, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(400, generator=generator) * torch.logspace(-6, 4, 400)
    edges = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 7.84, 1.96, 448.0, 0.0, -0.0, 2**-9, 2**-10, 3 * 2**-10]
    return torch.cat([some, torch.tensor([*edges, float("inf"), -float("inf"), float("nan")])])


def products() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn((16, 16), generator=generator).bfloat16() for _ in range(2))
    out = torch.zeros((16, 16))
    interpreted(dot_kernel, a, b, out, N=16)
    return a, b, out


def to_bfloat16() -> None:
    check(cast(floats(), torch.bfloat16), floats().bfloat16())


def from_bfloat16() -> None:
    narrow = floats().bfloat16()
    check(cast(narrow, torch.float16), narrow.half())
    check(cast(narrow, torch.float32), narrow.float())


def integers_to_bfloat16() -> None:
    whole = torch.arange(-130, 130, dtype=torch.int32)
    check(cast(whole.to(torch.int8), torch.bfloat16), whole.to(torch.int8).bfloat16())
    check(cast(whole, torch.bfloat16), whole.bfloat16())


def to_float8() -> None:
    values = floats().clamp(-448, 448)
    for source in (values, values.half(), values.bfloat16()):
        check(cast(source, FLOAT8).float(), source.to(FLOAT8).float())


def from_float8() -> None:
    every = torch.arange(256).to(torch.uint8).view(FLOAT8)
    check(cast(every, torch.float32), every.float())
    check(cast(every, torch.bfloat16), every.bfloat16())


def dot_of_bfloat16() -> None:
    a, b, out = products()
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=1e-5, rtol=1e-5)


def loop_over_loaded_bounds() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    interpreted(loop_kernel, torch.tensor([3, 40, 5], dtype=torch.int32), out)
    assert out.item() == sum(range(3, 40, 5))


def check(actual: Tensor, expected: Tensor) -> None:
    """The same values; NaN where NaN is."""
    torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)


@dataclass(frozen=True)
class Mend:
    right: Callable[[], None]  # raises unless the values are right
    faulty_to: tuple[int, int] | None  # last version known to have the fault; None: right without the mend, too


MENDS = [
    Mend(to_bfloat16, (3, 8)),
    Mend(from_bfloat16, None),
    Mend(integers_to_bfloat16, (3, 8)),
    Mend(to_float8, (3, 8)),
    Mend(from_float8, (3, 8)),
    Mend(dot_of_bfloat16, (3, 8)),
    Mend(loop_over_loaded_bounds, (3, 6)),
]


@pytest.fixture(autouse=True)
def mended() -> None:
    interpreter.install()


@pytest.fixture
def unmended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter as it came."""
    for name, original in interpreter.ORIGINALS.items():
        monkeypatch.setattr(upstream.InterpreterBuilder if name.startswith("create") else upstream, name, original)


@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.right.__name__)
def test_with_the_mend_the_values_are_right(mend: Mend) -> None:
    mend.right()


@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.right.__name__)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_without_it_they_are_wrong(mend: Mend, unmended: None) -> None:
    """Else the mend has nothing to do, and the test of it shows nothing."""
    if mend.faulty_to is not None and mend.faulty_to >= VERSION:
        with pytest.raises((AssertionError, upstream.InterpreterError)):
            mend.right()
    else:
        mend.right()


def test_arithmetic_on_the_bits_of_bfloat16_is_refused() -> None:
    with pytest.raises(upstream.InterpreterError, match="create_fadd on bfloat16"):
        interpreted(add_kernel, torch.ones(4).bfloat16(), torch.zeros(4).bfloat16(), N=4)


def test_a_second_install_changes_nothing() -> None:
    before = upstream.InterpreterBuilder.create_dot
    interpreter.install()
    assert upstream.InterpreterBuilder.create_dot is before
