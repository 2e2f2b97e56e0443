"""What warps leave for others: a vector in shared memory, and the word that their part is done."""

import cutlass.cute as cute

from dqkv_kernels.device.sm100 import barrier


def signal(tensor_memory, address):
    """A warp's arrival on an mbarrier, after what all its threads did."""
    tensor_memory.before_signal()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        barrier.arrive(address)


def store_vector(address, values):
    """16 bytes to shared memory: four registers of 32 bits."""
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", read_only_args=[address, *values])
