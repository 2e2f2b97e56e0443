"""mbarriers in rings: which phase of which barrier belongs to a use, and how a warp waits for it and completes it."""

import cutlass.cute as cute
from cutlass import Int32

MBARRIER_BYTES = 8


def address(program, base, name, use):
    """Int32 shared address of the mbarrier of one use of a ring. base: Int32 shared address of the first mbarrier."""
    first = base + program.barrier_index(name) * MBARRIER_BYTES
    # rings are 1 or 2 long, so that negative uses have a stage and a phase too
    return first + (use & (program.barrier(name).stages - 1)) * MBARRIER_BYTES


def parity(program, name, use):
    """The phase bit that says that a use is complete; it says so of uses before the first from the start."""
    return (use >> (program.barrier(name).stages - 1)) & 1


def initialize(program, base):
    """Makes all mbarriers; one thread."""
    index = 0
    for barrier in program.barriers:
        for _ in range(barrier.stages):
            cute.arch.inline_ptx(
                "mbarrier.init.shared::cta.b64 [{$r0}], {$r1};",
                read_only_args=[base + index * MBARRIER_BYTES, Int32(barrier.arrivals)],
            )
            index += 1
    cute.arch.inline_ptx("fence.mbarrier_init.release.cluster;")


def wait(program, base, name, use):
    """Until a use of a ring is complete."""
    await_phase(address(program, base, name, use), parity(program, name, use))


def await_phase(address, parity):
    """Until the phase of a parity of one mbarrier is complete."""
    cute.arch.inline_ptx(
        "{\n.reg .pred p;\nwaiting:\nmbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1};\n"
        "@p bra complete;\nbra waiting;\ncomplete:\n}",
        read_only_args=[address, parity],
    )


def arrive(address):
    """One arrival; what this thread did before is seen by who waits."""
    cute.arch.inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[address])


def expect(address, nbytes):
    """One arrival, and so many bytes of copies to come before the phase is complete."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[address, Int32(nbytes)]
    )
