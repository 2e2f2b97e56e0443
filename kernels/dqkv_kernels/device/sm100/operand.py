"""Operands of tcgen05.mma in shared memory, and the numbers that describe them and a product to the instruction.

An operand of (rows, columns) 16-bit elements lies in blocks of 64 columns: 128 bytes a row, the 16-byte vectors of
each 8 rows permuted by an exclusive or with the row (the 128-byte swizzle). The bit fields are those of the PTX ISA,
sections "tcgen05 shared memory descriptor" and "instruction descriptor" for .kind::f16.
"""

from __future__ import annotations

from dataclasses import dataclass

DEPTH, ROWS = "depth", "rows"
"""Along what an operand is contiguous: the sum's index ("K-major"), or its own rows ("MN-major")."""
BLOCK_COLUMNS = 64
BLOCK_ROW_BYTES = 128
GROUP_BYTES = 8 * BLOCK_ROW_BYTES
"""Bytes of 8 rows of a block, within which the swizzle permutes."""
MMA_DEPTH = 16
"""Elements of the sum that one instruction takes."""
MMA_M = 128
"""Rows of every product here: row r of the result is lane r of tensor memory."""

_SWIZZLE_128B = 2
_VERSION = 1
_FP32_RESULT = 1
DTYPE_CODES = {"fp16": 0, "bf16": 1}


@dataclass(frozen=True, kw_only=True)
class Operand:
    """(rows, columns) of 16-bit elements and how many copies of it there are. in_shared_memory: or in tensor memory."""

    name: str
    rows: int
    columns: int
    stages: int = 1
    in_shared_memory: bool = True

    @property
    def stage_bytes(self) -> int:
        """Bytes of one copy."""
        return self.rows * self.columns * 2

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of 64 columns."""
        return self.rows * BLOCK_ROW_BYTES

    def byte_offset(self, row: int, column: int) -> int:
        """Where element (row, column) of a copy lies: plain integers, for the host and tests."""
        block, within = divmod(column, BLOCK_COLUMNS)
        vector, element = divmod(within, 8)
        return block * self.block_bytes + row * BLOCK_ROW_BYTES + (vector ^ row % 8) * 16 + element * 2


@dataclass(frozen=True, kw_only=True)
class Product:
    """d (+)= A B^T, A of (128, depth) and B of (n, depth), taken by an act of the multiply role.

    a_major, b_major: DEPTH where the operand's columns are the sum's index and its rows A's or B's; ROWS where its rows
    are the sum's index, and its columns from a_column or b_column on A's or B's rows. part: of d's slot. sums: added to
    d but for the first step.
    """

    act: str
    a: str
    a_major: str
    b: str
    b_major: str
    d: str
    n: int
    depth: int
    m: int = MMA_M
    a_column: int = 0
    b_column: int = 0
    part: int = 0
    sums: bool = False

    @property
    def instructions(self) -> int:
        """How many tcgen05.mma it takes."""
        return self.depth // MMA_DEPTH


def instruction_descriptor(product: Product, dtype: str) -> int:
    """The 32 bits that say what one tcgen05.mma of the product multiplies; dtype: "bf16" or "fp16"."""
    code = DTYPE_CODES[dtype]
    fields = (
        (_FP32_RESULT, 4),
        (code, 7),
        (code, 10),
        (product.a_major == ROWS, 15),
        (product.b_major == ROWS, 16),
        (product.n // 8, 17),
        (product.m // 16, 24),
    )
    return sum(int(value) << bit for value, bit in fields)


def descriptor(operand: Operand, major: str) -> int:
    """The 64 bits that describe an operand to tcgen05.mma, but for the address (in units of 16 bytes, bits 0 to 13).

    Stride: from 8 rows of a block to the next 8. Leading: from a block of 64 columns to the next, where an instruction
    takes columns as rows; along the sum's index an instruction stays within a block, and the field is not read.
    """
    leading = operand.block_bytes // 16 if major == ROWS else 1
    return leading << 16 | GROUP_BYTES // 16 << 32 | _VERSION << 46 | _SWIZZLE_128B << 61


def descriptor_offset(operand: Operand, major: str, step: int, column: int = 0) -> int:
    """Bytes from an operand's begin to what the step-th instruction reads; column: its first, where they are rows."""
    if major == ROWS:
        return column // BLOCK_COLUMNS * operand.block_bytes + step * MMA_DEPTH * BLOCK_ROW_BYTES
    block, within = divmod(step * MMA_DEPTH, BLOCK_COLUMNS)
    return block * operand.block_bytes + within * 2
