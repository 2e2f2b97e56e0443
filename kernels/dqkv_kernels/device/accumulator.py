"""The order of dq_accum: a tile_m x head_dim block for each tile of queries, as what made it holds it.

mma.sync and wgmma leave it in registers: register i of thread t lies at float (i // width) * width * num_threads +
t * width + i % width, so that what a warp adds in one instruction is contiguous. `width` is 4 where
red.global.add.v4.f32 exists, else 1. tcgen05 leaves it in tensor memory, a row of the tile in each lane: four columns
of a row are a vector, and the vectors of all rows at the same columns lie side by side.
"""

import cutlass.cute as cute
from cutlass import Float32, Int64


def add(address, fragment, tid, num_threads, width):
    """Adds a thread's registers to the block that starts at the Int64 byte `address`."""
    start = address + Int64(tid * (width * 4))
    for i in range(0, cute.size(fragment), width):
        target = start + i * num_threads * 4
        if width == 4:
            cute.arch.inline_ptx(
                "red.global.add.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
                read_only_args=[target, fragment[i], fragment[i + 1], fragment[i + 2], fragment[i + 3]],
            )
        else:
            cute.arch.inline_ptx("red.global.add.f32 [{$r0}], {$r1};", read_only_args=[target, fragment[i]])


def read(address, fragment, tid, num_threads, width):
    """Fills a thread's registers from the block that starts at the Int64 byte `address`."""
    start = address + Int64(tid * (width * 4))
    for i in range(0, cute.size(fragment), width):
        source = start + i * num_threads * 4
        if width == 4:
            values = cute.arch.inline_ptx(
                "ld.global.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
                write_only_types=[Float32] * 4,
                read_only_args=[source],
            )
            for j in range(4):
                fragment[i + j] = values[j]
        else:
            fragment[i] = cute.arch.inline_ptx(
                "ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[source]
            )


def index(register, thread, num_threads, width):
    """The place (in floats) of a thread's register in the block: plain integers, for the host and tests."""
    return register // width * width * num_threads + thread * width + register % width


LANE_ROWS, LANE_VECTORS = 4, 8
"""Rows and vectors of four columns that a warp reads at once of a block made of lanes: both ways whole sectors."""
CHUNK = 4 * LANE_VECTORS
"""Columns of a row that a warp reads at once."""


def lanes_place(tid, step, chunk, num_threads):
    """(row, column) of the four columns that a thread reads in a step of rows and a chunk of 32 columns."""
    rows_a_step = num_threads // 32 * LANE_ROWS
    row = step * rows_a_step + tid // 32 * LANE_ROWS + tid % 32 // LANE_VECTORS
    return row, chunk * CHUNK + tid % LANE_VECTORS * 4


def lanes_index(row, column, tile_m):
    """The place (in floats) of a row's vector of four columns, the first of them `column`, in a block made of lanes."""
    return column * tile_m + row * 4


def read_lanes(address, row, column, tile_m):
    """Four columns of a row from the block that starts at the Int64 byte `address`."""
    return cute.arch.inline_ptx(
        "ld.global.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address + Int64(lanes_index(row, column, tile_m) * 4)],
    )
