"""The softmax warps: S to P, dP to dS, and at the end dK and dV out of tensor memory.

Warp w has the lanes from 32 * (w % 4) on and, w // 4, the first or the second half of the columns; thread l lane l.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from dqkv_kernels.device.sm100 import barrier
from dqkv_kernels.device.sm100.operand import BLOCK_COLUMNS, BLOCK_ROW_BYTES
from dqkv_kernels.device.sm100.program import Act, Role, Wait
from dqkv_kernels.device.sm100.signal import signal, store_vector
from dqkv_kernels.device.sm100.tensor_memory import COLUMNS_A_LOAD, COLUMNS_A_STORE, LANE
from dqkv_kernels.device.softmax import probabilities

WARP = 32
LANES = 128
COLUMNS_AT_ONCE = 16
"""Whose statistics are in registers together: more would not fit beside P."""


class Scores:
    """The softmax role of a main loop that has `program`, `dtype`, `softcap` and `tensor_memory`."""

    @cute.jit
    def take_softmax(
        self,
        dk: cute.Tensor,
        dv: cute.Tensor,
        mask,
        sequence,
        walk,
        place,
        scales,
        shared: Int32,
        barriers,
        columns: Int32,
        tid: Int32,
    ):
        """All steps of a CTA, then its gradients."""
        program = self.program
        first_head, m_first, tiles_m, total = walk
        n = place[1]
        half = cute.arch.make_warp_uniform(tid // LANES)
        lanes = columns + tid % LANES // WARP * WARP * LANE
        # P, times the slope of the softcap if there is one, from one act to the other
        rP = cute.make_rmem_tensor(cute.make_layout(program.slot("s").parts[0][1] // 2), Float32)
        m = m_first
        for i in cutlass.range(total, unroll=1):
            for step in program.each[Role.SOFTMAX]:
                use = i + step.at
                if const_expr(isinstance(step, Wait)):
                    barrier.wait(program, barriers, step.barrier, use)
                    self.tensor_memory.after_wait()
                elif const_expr(isinstance(step, Act) and step.name == "probabilities"):
                    self.to_probabilities(rP, mask, scales, m, n, i, half, lanes, shared, tid)
                elif const_expr(isinstance(step, Act)):
                    self.to_dscores(rP, i, half, lanes, shared, tid)
                else:
                    signal(self.tensor_memory, barrier.address(program, barriers, step.barrier, use))
            m = Int32(cutlass.select_(m + 1 == m_first + tiles_m, m_first, m + 1))
        for step in program.last[Role.SOFTMAX]:
            if const_expr(isinstance(step, Wait)):
                use = total - 1 + step.at
                barrier.wait(program, barriers, step.barrier, use)
                self.tensor_memory.after_wait()
            else:
                self.write_gradients(dk, dv, sequence, place, scales[2], half, lanes, columns, tid)

    @cute.jit
    def to_probabilities(
        self,
        rP: cute.Tensor,
        mask,
        scales,
        m: Int32,
        n: Int32,
        i: Int32,
        half: Int32,
        lanes: Int32,
        shared: Int32,
        tid: Int32,
    ):
        """S to P: fp32 stays in rP, 16 bits go where the product that makes dV reads them."""
        program = self.program
        axis_k = 0 if program.lanes == "keys" else 1
        identity = cute.make_identity_tensor((LANES, 2 * cute.size(rP)))
        lane = tid % LANES
        for chunk in cutlass.range_constexpr(cute.size(rP) // COLUMNS_A_LOAD):
            rS = part_of(rP, chunk, COLUMNS_A_LOAD)
            column = half * cute.size(rP) + chunk * COLUMNS_A_LOAD
            self.tensor_memory.load(lanes + program.slot("s").parts[0][0] + column, rS)
            rounded = cute.make_rmem_tensor(cute.make_layout(COLUMNS_A_LOAD), self.dtype)
            for p in cutlass.range_constexpr(COLUMNS_A_LOAD // COLUMNS_AT_ONCE):
                here = column + p * COLUMNS_AT_ONCE
                # (1, columns): what each register is of
                where = cute.local_tile(cute.domain_offset((lane, here), identity), (1, COLUMNS_AT_ONCE), (0, 0))
                lse_log2 = statistic(program, "lse_log2", i, lane, here, shared)
                scores, rest = part_of(rS, p, COLUMNS_AT_ONCE), part_of(rounded, p, COLUMNS_AT_ONCE)
                probabilities(scores, rest, lse_log2, where, mask, scales, m, n, axis_k, self.softcap)
            words = cute.recast_tensor(rounded, Int32)
            if const_expr(program.operand("p").in_shared_memory):
                store_row(program, "p", words, lane, column, shared)
            else:
                # each half of the warps has a part of P's columns, over those of S that it has read
                first, second = (part[0] for part in program.slot("p").parts)
                target = first + half * (second - first) + chunk * COLUMNS_A_STORE
                self.tensor_memory.store(lanes + target, words)
        if const_expr(program.operand("p").in_shared_memory):
            cute.arch.inline_ptx("fence.proxy.async.shared::cta;")

    @cute.jit
    def to_dscores(
        self,
        rP: cute.Tensor,
        i: Int32,
        half: Int32,
        lanes: Int32,
        shared: Int32,
        tid: Int32,
    ):
        """dP to dS = P (dP - delta), in 16 bits to shared memory."""
        program = self.program
        lane = tid % LANES
        for chunk in cutlass.range_constexpr(cute.size(rP) // COLUMNS_A_LOAD):
            column = half * cute.size(rP) + chunk * COLUMNS_A_LOAD
            rdP = cute.make_rmem_tensor(cute.make_layout(COLUMNS_A_LOAD), Float32)
            self.tensor_memory.load(lanes + program.slot("dp").parts[0][0] + column, rdP)
            rounded = cute.make_rmem_tensor(cute.make_layout(COLUMNS_A_LOAD), self.dtype)
            for p in cutlass.range_constexpr(COLUMNS_A_LOAD // COLUMNS_AT_ONCE):
                first = p * COLUMNS_AT_ONCE
                delta = statistic(program, "delta", i, lane, column + first, shared)
                for j in cutlass.range_constexpr(COLUMNS_AT_ONCE):
                    ds = rP[chunk * COLUMNS_A_LOAD + first + j] * (rdP[first + j] - delta[j])
                    rounded[first + j] = ds.to(self.dtype)
            store_row(program, "ds", cute.recast_tensor(rounded, Int32), lane, column, shared)
        cute.arch.inline_ptx("fence.proxy.async.shared::cta;")


def part_of(registers, part, count):
    """The part-th so many of a thread's registers."""
    return cute.make_tensor(registers.iterator + part * count, cute.make_layout(count))


def statistic(program, name, i, lane, column, shared):
    """A statistic of each of COLUMNS_AT_ONCE registers: of their own query each, or all of the lane's."""
    stages = program.operand("q").stages
    first = shared + program.shared[name] + (i & (stages - 1)) * program.loaded_bytes(name)
    if program.lanes == "queries":
        one = cute.make_rmem_tensor(cute.make_layout(1), Float32)
        one[0] = cute.arch.inline_ptx(
            "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[first + lane * 4]
        )
        return cute.make_tensor(one.iterator, cute.make_layout(COLUMNS_AT_ONCE, stride=0))
    registers = cute.make_rmem_tensor(cute.make_layout(COLUMNS_AT_ONCE), Float32)
    for j in range(0, COLUMNS_AT_ONCE, 4):
        values = cute.arch.inline_ptx(
            "ld.shared.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[first + (column + j) * 4],
        )
        for x in range(4):
            registers[j + x] = values[x]
    return registers


def store_row(program, name, words, row, column, shared):
    """COLUMNS_A_LOAD elements of 16 bits (words: of 32) of an operand's row, from a column on, to shared memory."""
    operand = program.operand(name)
    block, within = column // BLOCK_COLUMNS, column % BLOCK_COLUMNS
    first = shared + program.shared[name] + block * operand.block_bytes + row * BLOCK_ROW_BYTES
    for j in range(COLUMNS_A_LOAD // 8):
        vector = (within // 8 + j) ^ (row % 8)
        store_vector(first + vector * 16, [words[4 * j + x] for x in range(4)])
