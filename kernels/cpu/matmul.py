"""Small float32 matrix products out of register blocks. Knows no attention.

Six rows by four vectors are 24 accumulators, which with four vectors of b and one of a fill the 32 registers of
AVX-512. Machines with smaller registers take one row at a time. Neither changes a bit of the result.
"""

from __future__ import annotations

from typing import Any

from kernels.cpu.features import HAS_AVX512
from kernels.cpu.jit import part
from kernels.cpu.vectors import LANES, multiply_block

ROW_BLOCK = 6 if HAS_AVX512 else 1


def _rows_by(vectors: int) -> Any:
    """A function of `rows` (at most 6) rows by so many vectors of columns."""

    @part
    def rows_by(rows, a, a_stride, b, b_stride, c, c_stride, depth, decay):
        if rows == 6:
            multiply_block(6, vectors, a, a_stride, b, b_stride, c, c_stride, depth, decay)
        elif rows == 5:
            multiply_block(5, vectors, a, a_stride, b, b_stride, c, c_stride, depth, decay)
        elif rows == 4:
            multiply_block(4, vectors, a, a_stride, b, b_stride, c, c_stride, depth, decay)
        elif rows == 3:
            multiply_block(3, vectors, a, a_stride, b, b_stride, c, c_stride, depth, decay)
        elif rows == 2:
            multiply_block(2, vectors, a, a_stride, b, b_stride, c, c_stride, depth, decay)
        else:
            multiply_block(1, vectors, a, a_stride, b, b_stride, c, c_stride, depth, decay)

    return rows_by


_rows, _half_rows, _narrow_rows = _rows_by(4), _rows_by(2), _rows_by(1)


@part
def multiply(rows, columns, a, a_stride, b, b_stride, c, c_stride, depth, decay):
    """c = diag(decay) c + a b, or with decay 0 (no address) c = a b; columns is a multiple of 16, strides in bytes."""
    vectors = columns // LANES
    for row in range(0, rows, ROW_BLOCK):
        count = min(ROW_BLOCK, rows - row)
        row_decay = decay + 4 * row if decay != 0 else decay
        vector = 0
        while vector < vectors:
            b_part = b + 64 * vector
            c_part = c + row * c_stride + 64 * vector
            if vectors - vector >= 4:
                _rows(count, a + row * a_stride, a_stride, b_part, b_stride, c_part, c_stride, depth, row_decay)
                vector += 4
            elif vectors - vector >= 2:
                _half_rows(count, a + row * a_stride, a_stride, b_part, b_stride, c_part, c_stride, depth, row_decay)
                vector += 2
            else:
                _narrow_rows(count, a + row * a_stride, a_stride, b_part, b_stride, c_part, c_stride, depth, row_decay)
                vector += 1
