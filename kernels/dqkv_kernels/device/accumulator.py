"""The order of dq_accum: a tile_m x head_dim block for each tile of queries, as the registers that made it hold it.

Register i of thread t lies at float (i // width) * width * num_threads + t * width + i % width, so that what a warp
adds in one instruction is contiguous. `width` is 4 where red.global.add.v4.f32 exists, else 1.
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
