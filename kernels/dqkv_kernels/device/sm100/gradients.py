"""dK and dV from tensor memory to global memory, straight from registers: once a tile, so nothing is staged."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dqkv_kernels.device.seqlen import key_address, row_stride_bytes
from dqkv_kernels.device.sm100.tensor_memory import COLUMNS_A_LOAD

LANES = 128


class Gradients:
    """How a main loop that has `program`, `grad_dtype` and `tensor_memory` writes dK and dV."""

    @cute.jit
    def write_gradients(
        self,
        dk: cute.Tensor,
        dv: cute.Tensor,
        sequence,
        place,
        softmax_scale: Float32,
        half: Int32,
        lanes: Int32,
        columns: Int32,
        tid: Int32,
    ):
        """A tile of dK and of dV: half the warps write each where lanes are keys, else half the keys of both."""
        if const_expr(self.program.lanes == "keys"):
            if half == 0:
                self.write_rows("dk", dk, self.program.head_dim, sequence, place, softmax_scale, lanes, tid)
            else:
                self.write_rows("dv", dv, self.program.head_dim_v, sequence, place, Float32(1.0), lanes, tid)
        else:
            self.write_columns("dk", dk, sequence, place, softmax_scale, half, lanes, tid)
            self.write_columns("dv", dv, sequence, place, Float32(1.0), half, lanes, tid)

    @cute.jit
    def write_rows(
        self,
        slot: cutlass.Constexpr,
        gradient: cute.Tensor,
        width: cutlass.Constexpr,
        sequence,
        place,
        scale: Float32,
        lanes: Int32,
        tid: Int32,
    ):
        """A thread's key, 16 bytes at a time, but for keys past the sequence and columns past the head's width."""
        head, n = place
        row = n * self.program.tile_n + tid % LANES
        address = key_address(sequence, gradient, head, row)
        rG = cute.make_rmem_tensor(cute.make_layout(COLUMNS_A_LOAD), Float32)
        for chunk in cutlass.range_constexpr(width // COLUMNS_A_LOAD):
            column = chunk * COLUMNS_A_LOAD
            self.tensor_memory.load(lanes + self.program.slot(slot).parts[0][0] + column, rG)
            rounded = cute.make_rmem_tensor(cute.make_layout(COLUMNS_A_LOAD), self.grad_dtype)
            for j in cutlass.range_constexpr(COLUMNS_A_LOAD):
                rounded[j] = (rG[j] * scale).to(self.grad_dtype)
            words = cute.recast_tensor(rounded, Int32)
            element_bytes = self.grad_dtype.width // 8
            for vector in cutlass.range_constexpr(COLUMNS_A_LOAD * element_bytes // 16):
                first = column + vector * 16 // element_bytes
                exists = (row < sequence.seqlen_k) & (first < gradient.shape[3])
                cute.arch.inline_ptx(
                    "st.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
                    read_only_args=[address + first * element_bytes, *(words[4 * vector + x] for x in range(4))],
                    predicate=exists,
                )

    @cute.jit
    def write_columns(
        self,
        slot: cutlass.Constexpr,
        gradient: cute.Tensor,
        sequence,
        place,
        scale: Float32,
        half: Int32,
        lanes: Int32,
        tid: Int32,
    ):
        """A thread's column of each 128, a key at a time: a warp's stores lie side by side."""
        head, n = place
        program = self.program
        first_key = half * COLUMNS_A_LOAD
        row = n * program.tile_n + first_key
        rows = sequence.seqlen_k - row
        address = key_address(sequence, gradient, head, row)
        pitch = row_stride_bytes(gradient)
        element_bytes = const_bytes(self.grad_dtype)
        rG = cute.make_rmem_tensor(cute.make_layout(COLUMNS_A_LOAD), Float32)
        for part in cutlass.range_constexpr(len(program.slot(slot).parts)):
            self.tensor_memory.load(lanes + program.slot(slot).parts[part][0] + first_key, rG)
            column = part * LANES + tid % LANES
            target = address + Int64(column * element_bytes)
            for j in cutlass.range_constexpr(COLUMNS_A_LOAD):
                store_element(
                    target + pitch * j, rG[j] * scale, self.grad_dtype, (j < rows) & (column < gradient.shape[3])
                )

    @cute.jit
    def write_zeros(self, gradient: cute.Tensor, sequence, place, tid: Int32):
        """Zeros to a tile that no query sees; all threads of the CTA."""
        head, n = place
        program = self.program
        address = key_address(sequence, gradient, head, n * program.tile_n)
        rows = cutlass.min(sequence.seqlen_k - n * program.tile_n, Int32(program.tile_n))
        elements = 16 // const_bytes(self.grad_dtype)
        vectors = (Int32(gradient.shape[3]) + (elements - 1)) // elements
        for x in cutlass.range(tid, rows * vectors, self.num_threads, unroll=1):
            cute.arch.inline_ptx(
                "st.global.v4.b32 [{$r0}], { {$r1}, {$r1}, {$r1}, {$r1} };",
                read_only_args=[
                    address + Int64(x // vectors) * row_stride_bytes(gradient) + Int64(x % vectors * 16),
                    Int32(0),
                ],
            )


def const_bytes(dtype):
    """Bytes of an element."""
    return dtype.width // 8


def store_element(address, value, dtype, exists):
    """One number, rounded to a dtype, to an Int64 address of global memory."""
    if dtype is Float32:
        cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=exists)
        return
    pair = cute.make_rmem_tensor(cute.make_layout(2), dtype)
    pair[0] = value.to(dtype)
    pair[1] = dtype(0.0)
    word = cute.recast_tensor(pair, Int32)[0]
    cute.arch.inline_ptx(
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r1};\n.reg .pred p;\nsetp.ne.s32 p, {$r2}, 0;\n"
        "@p st.global.b16 [{$r0}], low;\n}",
        read_only_args=[address, word, Int32(exists)],
    )
