"""Tiles of 16-bit elements between global and shared memory, and how they lie in shared memory.

A tile of (rows, width) is cut into blocks of 64 columns (32 where the width is no multiple of 64). A block is
row-major, and within 8 rows its 16-byte vectors are permuted by an exclusive or with the row, so that 8 rows of one
column of vectors (what ldmatrix reads) fall into different banks.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

VECTOR = 8
"""Elements of 16 bits in one 16-byte vector."""


def block_width(width):
    """Columns of one block of a tile that is `width` columns wide."""
    return 64 if width % 64 == 0 else 32


def tile_layout(rows, width, stages=1):
    """The CuTe layout of (rows, width, stages) in shared memory, before `tile_swizzle` permutes its vectors."""
    columns = block_width(width)
    atom = cute.make_layout((8, columns), stride=(columns, 1))
    return cute.tile_to_shape(atom, (rows, width, stages), order=(0, 1, 2))


def tile_swizzle(width):
    """The permutation, as one of byte addresses: bits 4 and up (a 16-byte vector) mixed with bits 7 and up (a row)."""
    return cute.make_swizzle(3 if block_width(width) == 64 else 2, 4, 3)


def transposed(tile):
    """The same shared memory seen with its first two modes swapped: (rows, width, ...) -> (width, rows, ...)."""
    rows, width, *rest = (cute.size(mode) for mode in tile.shape)
    shape = (width, rows, *rest)
    return cute.composition(tile, cute.make_ordered_layout(shape, order=(1, 0, *range(2, cute.rank(tile)))))


class TileCopy:
    """How `num_threads` threads move a (rows, width) tile, 16 bytes a thread and step."""

    def __init__(self, rows, width, num_threads):
        self.rows, self.width, self.num_threads = rows, width, num_threads
        self.columns = block_width(width)
        self.lanes = self.columns // VECTOR
        self.rows_a_pass = num_threads // self.lanes
        self.passes = (rows + self.rows_a_pass - 1) // self.rows_a_pass
        self.blocks = width // self.columns
        self.whole = rows % self.rows_a_pass == 0

    def first(self, tid):
        """(row, vector, byte offset in shared memory) of a thread's first vector."""
        row, vector = tid // self.lanes, tid % self.lanes
        # the row's bits that the swizzle mixes in: 8 rows of 128 bytes, or 4 pairs of rows of 64 bytes
        mix = row % 8 if self.lanes == 8 else (row // 2) % 4
        return row, vector, (row * self.columns + (vector ^ mix) * VECTOR) * 2

    def load(self, shared, address, row_stride, limits, tid):
        """Starts the copy into shared memory; rows and columns past `limits` become zeros without being read.

        shared: Int32 address of the tile. address: Int64 address of its element (0, 0) in global memory.
        row_stride: Int64 bytes. limits: (rows, columns) that exist.
        """
        row, vector, offset = self.first(tid)
        source = address + Int64(row) * row_stride + Int64(vector * (VECTOR * 2))
        for p in range(self.passes):
            here = row + p * self.rows_a_pass
            for block in range(self.blocks):
                exists = (here < limits[0]) & (vector * VECTOR + block * self.columns < limits[1])
                nbytes = Int32(cutlass.select_(exists, Int32(16), Int32(0)))
                target = shared + offset + (p * self.rows_a_pass + block * self.rows) * self.columns * 2
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                    read_only_args=[target, source + block * self.columns * 2, nbytes],
                    predicate=None if self.whole else here < self.rows,
                )
            source = source + row_stride * self.rows_a_pass

    def store(self, shared, address, row_stride, limits, tid):
        """Writes the tile from shared to global memory, but for rows and columns past `limits`."""
        row, vector, offset = self.first(tid)
        target = address + Int64(row) * row_stride + Int64(vector * (VECTOR * 2))
        for p in range(self.passes):
            here = row + p * self.rows_a_pass
            for block in range(self.blocks):
                exists = (here < limits[0]) & (vector * VECTOR + block * self.columns < limits[1])
                if not self.whole:
                    exists = exists & (here < self.rows)
                source = shared + offset + (p * self.rows_a_pass + block * self.rows) * self.columns * 2
                cute.arch.inline_ptx(
                    "{\n.reg .pred p;\n.reg .b32 a, b, c, d;\nsetp.ne.s32 p, {$r2}, 0;\n"
                    "@p ld.shared.v4.b32 {a, b, c, d}, [{$r0}];\n@p st.global.v4.b32 [{$r1}], {a, b, c, d};\n}",
                    read_only_args=[source, target + block * self.columns * 2, Int32(exists)],
                )
            target = target + row_stride * self.rows_a_pass
