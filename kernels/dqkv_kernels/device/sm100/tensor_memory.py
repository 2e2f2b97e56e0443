"""Tensor memory and the products that land in it: the tcgen05 instructions, and nothing else uses them.

An address is (lane << 16) + column. A warp reads and writes the 32 lanes from 32 * (warp % 4) on, lane l thread l.
Source: PTX ISA, "Tensor Memory" and the tcgen05 family.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from dqkv_kernels.device.sm100.operand import MMA_DEPTH, descriptor, descriptor_offset, instruction_descriptor
from dqkv_kernels.device.sm100.program import TENSOR_MEMORY_COLUMNS

LANE = 1 << 16
UNIT_BYTES = 16
"""Of addresses in descriptors."""
COLUMNS_A_LOAD = 32
COLUMNS_A_STORE = 16


class TensorMemory:
    """The instructions, one function each."""

    def allocate(self, where):
        """All columns for this CTA; their address lands at shared address `where`. A whole warp."""
        cute.arch.inline_ptx(
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{$r0}], {$r1};",
            read_only_args=[where, Int32(TENSOR_MEMORY_COLUMNS)],
        )
        cute.arch.inline_ptx("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;")

    def free(self, address):
        """Gives the columns back. The warp that allocated them."""
        cute.arch.inline_ptx(
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 {$r0}, {$r1};",
            read_only_args=[address, Int32(TENSOR_MEMORY_COLUMNS)],
        )

    def before_signal(self):
        """What this thread's tcgen05 instructions did comes before its next arrival."""
        cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")

    def after_wait(self):
        """This thread's next tcgen05 instructions come after what it has waited for."""
        cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")

    def multiply(self, program, product, dtype, tensor_memory, a, b, is_first):
        """Starts all instructions of a product; one thread, always the same.

        tensor_memory: Int32 address of column 0. a, b: Int32 shared addresses of the operands' copies. is_first: Int32,
        1 when a result that sums begins.
        """
        left, right = program.operand(product.a), program.operand(product.b)
        target = tensor_memory + program.slot(product.d).parts[product.part][0]
        code = instruction_descriptor(product, dtype)
        b_low, b_high = _described(right, product.b_major, b)
        a_low, a_high = tensor_memory, 0
        if left.in_shared_memory:
            a_low, a_high = _described(left, product.a_major, a)
        for step in range(product.instructions):
            accumulate = Int32(1) if step else Int32(1) - is_first if product.sums else Int32(0)
            form, a_step = "a", descriptor_offset(left, product.a_major, step, product.a_column) // UNIT_BYTES
            if not left.in_shared_memory:
                form, a_step = "[{$r1}]", left_column(program, product.a, step)
            b_step = descriptor_offset(right, product.b_major, step, product.b_column) // UNIT_BYTES
            cute.arch.inline_ptx(
                "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, {$r3}, 0;\n"
                f"mov.b64 a, {{ {{$r1}}, {a_high} }};\nmov.b64 b, {{ {{$r2}}, {b_high} }};\n"
                f"tcgen05.mma.cta_group::1.kind::f16 [{{$r0}}], {form}, b, {code}, p;\n}}",
                read_only_args=[target, a_low + a_step, b_low + b_step, accumulate],
            )

    def commit(self, barrier):
        """One arrival at the shared address of an mbarrier once all products that this thread started are complete."""
        cute.arch.inline_ptx(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];", read_only_args=[barrier]
        )

    def load(self, address, registers):
        """32 columns of a lane into 32 fp32 registers (an rmem tensor), complete on return. A whole warp."""
        names = ", ".join(f"{{$w{j}}}" for j in range(COLUMNS_A_LOAD))
        values = cute.arch.inline_ptx(
            f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{ {names} }}, [{{$r0}}];\ntcgen05.wait::ld.sync.aligned;",
            write_only_types=[Float32] * COLUMNS_A_LOAD,
            read_only_args=[address],
        )
        for j in range(COLUMNS_A_LOAD):
            registers[j] = values[j]

    def store(self, address, registers):
        """16 registers (an rmem tensor of 32 bits each) to 16 columns of a lane, complete on return. A whole warp."""
        names = ", ".join(f"{{$r{j + 1}}}" for j in range(COLUMNS_A_STORE))
        cute.arch.inline_ptx(
            f"tcgen05.st.sync.aligned.32x32b.x16.b32 [{{$r0}}], {{ {names} }};\ntcgen05.wait::st.sync.aligned;",
            read_only_args=[address, *(registers[j] for j in range(COLUMNS_A_STORE))],
        )


def left_column(program, slot, step):
    """The column of the step-th 16 elements of a left operand in tensor memory, two elements a column."""
    column = step * (MMA_DEPTH // 2)
    for first, columns in program.slot(slot).parts:
        if column < columns:
            return first + column
        column -= columns
    raise KeyError(step)


def _described(operand, major, address):
    """(lower, upper) 32 bits of an operand's descriptor; steps are added to the lower, where no address overflows."""
    bits = descriptor(operand, major)
    return address // UNIT_BYTES | bits & 0xFFFFFFFF, bits >> 32
