"""The main loop for tcgen05: warps load, multiply, take the softmax and reduce dQ side by side, as `program` says.

Learned from FlashAttention's SM100 backward and CUTLASS's Blackwell attention example: which products share which
columns of tensor memory, P as a left operand where it lies, and dQ in bulk reduce-adds of 32 columns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from dqkv_kernels.device.main_loop import MainLoop
from dqkv_kernels.device.mask import Mask, end_m, first_m, tiles_after
from dqkv_kernels.device.seqlen import Sequence
from dqkv_kernels.device.sm100 import barrier
from dqkv_kernels.device.sm100.gradients import Gradients
from dqkv_kernels.device.sm100.loads import Loads, source
from dqkv_kernels.device.sm100.scores import Scores
from dqkv_kernels.device.sm100.program import (
    DRAIN_COLUMNS,
    NUM_THREADS,
    REGISTERS,
    WARPS,
    Act,
    Role,
    Wait,
    narrow,
    wide,
)
from dqkv_kernels.device.sm100.signal import signal, store_vector
from dqkv_kernels.device.sm100.tensor_memory import LANE, TensorMemory

WARP = 32
FIRST_REDUCE = WARPS[Role.SOFTMAX]
FIRST_MULTIPLY = FIRST_REDUCE + WARPS[Role.REDUCE]
FIRST_LOAD = FIRST_MULTIPLY + WARPS[Role.MULTIPLY]
REDUCE_THREADS = WARP * WARPS[Role.REDUCE]
REDUCE_BARRIER = 1
"""Hardware barrier of the reduce warps alone; 0 is the whole CTA's."""


def program_of(tile):
    """The program of a tile row."""
    if tile.main_loop == "sm100":
        return narrow(tile.head_dim, tile.head_dim_v, tile.stages_q, tile.stages_dout)
    return wide(tile.head_dim, tile.head_dim_v)


class MainLoop100(Loads, Scores, Gradients, MainLoop):
    """The kernel of one tile row. tensor_memory: what tcgen05 instructions it is made of."""

    tensor_memory = TensorMemory()

    def __init__(self, tile, dtype, grad_dtype, softcap):
        super().__init__(tile, dtype, grad_dtype, softcap)
        self.program = program_of(tile)
        self.num_threads = NUM_THREADS
        self.dtype_name = {cutlass.BFloat16: "bf16", cutlass.Float16: "fp16"}[dtype]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_accum: cute.Tensor,
        turns: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        sequences: cute.Tensor,
        tiles_k: Int32,
        inner_scale: Float32,
        outer_scale: Float32,
        softmax_scale: Float32,
        left: Int32,
        right: Int32,
        sink_tokens: Int32,
        deterministic: Int32,
        stream,
    ):
        """Launches a CTA for each of tiles_k tiles of keys, key heads and sequences; as `MainLoop.__call__`."""
        program = self.program
        sources = tuple(
            source(tensor, program.operand(name)) for name, tensor in (("k", k), ("v", v), ("q", q), ("dout", dout))
        )
        blocks = tiles_k * k.shape[2] * sequences.shape[0]
        self.kernel(
            q,
            k,
            sources,
            lse_log2,
            delta,
            dq_accum,
            turns,
            dk,
            dv,
            sequences,
            tiles_k,
            (inner_scale, outer_scale, softmax_scale),
            (left, right, sink_tokens),
            deterministic,
        ).launch(grid=[blocks, 1, 1], block=[NUM_THREADS, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        sources: tuple,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_accum: cute.Tensor,
        turns: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        sequences: cute.Tensor,
        tiles_k: Int32,
        scales: tuple,
        window: tuple,
        deterministic: Int32,
    ):
        """One CTA: grid (tiles_k * num_heads_kv * batch_size), the key tile changes fastest: low tiles start first."""
        program = self.program
        tid = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        n = block % tiles_k
        if deterministic != 0:
            # the last tile adds first: under a causal mask it is the first to reach any tile of queries that it sees
            n = tiles_k - 1 - n
        head_kv = (block // tiles_k) % k.shape[2]
        sequence = Sequence(sequences, block // tiles_k // k.shape[2])
        mask = Mask(sequence, window, program.tile_m, program.tile_n)
        if n * program.tile_n < sequence.seqlen_k:
            group = q.shape[2] // k.shape[2]
            m_first, m_end = first_m(mask, n), end_m(mask, n)
            tiles_m = cutlass.max(m_end - m_first, Int32(0))
            total = tiles_m * group
            # of the walk over queries: the first head, heads by tiles_m tiles each
            walk = (head_kv * group, m_first, tiles_m, total)
            place = (head_kv, n)
            if total > 0:
                self.step_through(
                    sources,
                    lse_log2,
                    delta,
                    dq_accum,
                    turns,
                    dk,
                    dv,
                    sequence,
                    mask,
                    walk,
                    place,
                    (scales, Int32(q.shape[3])),
                    deterministic,
                    tid,
                )
            else:
                self.write_zeros(dk, sequence, place, tid)
                self.write_zeros(dv, sequence, place, tid)

    @cute.jit
    def step_through(
        self,
        sources: tuple,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_accum: cute.Tensor,
        turns: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        sequence,
        mask,
        walk,
        place,
        facts: tuple,
        deterministic: Int32,
        tid: Int32,
    ):
        """Tile n of a key head: all its queries, then dK and dV."""
        program = self.program
        scales, width_q = facts
        memory = SmemAllocator().allocate(program.shared_memory_bytes, 1024)
        shared = Int32(memory.toint())
        barriers = shared + program.shared["barriers"]
        warp = cute.arch.make_warp_uniform(tid // WARP)
        if tid == 0:
            barrier.initialize(program, barriers)
        if warp == FIRST_MULTIPLY:
            self.tensor_memory.allocate(shared + program.shared["tensor_memory"])
        self.meet()
        columns = cute.arch.inline_ptx(
            "ld.shared.b32 {$w0}, [{$r0}];",
            write_only_types=[Int32],
            read_only_args=[shared + program.shared["tensor_memory"]],
        )
        # registers change hands for four warps at a time, by one instruction for all of them
        if warp >= FIRST_MULTIPLY:
            cute.arch.setmaxregister_decrease(REGISTERS[Role.MULTIPLY])
            if warp == FIRST_LOAD:
                self.load(sources, lse_log2, delta, sequence, walk, place, shared, barriers)
                self.meet()
            elif warp == FIRST_MULTIPLY:
                self.multiply(walk, shared, barriers, columns)
                self.meet()
                self.tensor_memory.free(columns)
            else:
                self.meet()
        elif warp >= FIRST_REDUCE:
            cute.arch.setmaxregister_decrease(REGISTERS[Role.REDUCE])
            self.reduce(
                dq_accum, turns, mask, sequence, walk, place, width_q, deterministic, shared, barriers, columns, tid
            )
            self.meet()
        else:
            cute.arch.setmaxregister_increase(REGISTERS[Role.SOFTMAX])
            self.take_softmax(dk, dv, mask, sequence, walk, place, scales, shared, barriers, columns, tid)
            self.meet()

    def meet(self):
        """All warps of the CTA have come here, and their tcgen05 instructions are done."""
        self.tensor_memory.before_signal()
        cute.arch.sync_threads()
        self.tensor_memory.after_wait()

    @cute.jit
    def multiply(self, walk, shared: Int32, barriers, columns: Int32):
        """The multiply warp: one thread starts products and commits them."""
        each, total = self.program.each[Role.MULTIPLY], walk[3]
        self.take_steps(self.program.first[Role.MULTIPLY], Int32(0), shared, barriers, columns)
        # step -1: of it only what concerns step 0
        self.take_steps([step for step in each if step.at > 0], Int32(-1), shared, barriers, columns)
        for i in cutlass.range(total, unroll=1):
            for steps in self.runs_of(each):
                if const_expr(steps[0].at > 0):
                    if i + 1 < total:
                        self.take_steps(steps, i, shared, barriers, columns)
                else:
                    self.take_steps(steps, i, shared, barriers, columns)

    def runs_of(self, steps):
        """The steps in order, cut where those that concern step i + 1 begin or end."""
        runs = []
        for step in steps:
            if runs and (runs[-1][0].at > 0) == (step.at > 0):
                runs[-1].append(step)
            else:
                runs.append([step])
        return runs

    @cute.jit
    def take_steps(self, steps: cutlass.Constexpr, i: Int32, shared: Int32, barriers, columns: Int32):
        """Waits, products and commits of the multiply role."""
        for step in steps:
            use = i + step.at
            if const_expr(isinstance(step, Wait)):
                barrier.wait(self.program, barriers, step.barrier, use)
                self.tensor_memory.after_wait()
            elif const_expr(isinstance(step, Act)):
                # shuffles in each step: what is derived from them is not kept in registers throughout the main loop
                here, target = cute.arch.make_warp_uniform(shared), cute.arch.make_warp_uniform(columns)
                with cute.arch.elect_one():
                    for product in self.program.products_of(step.name):
                        self.tensor_memory.multiply(
                            self.program,
                            product,
                            self.dtype_name,
                            target,
                            self.copy_of(product.a, use, here),
                            self.copy_of(product.b, use, here),
                            Int32(use == 0),
                        )
            else:
                with cute.arch.elect_one():
                    self.tensor_memory.commit(barrier.address(self.program, barriers, step.barrier, use))

    def copy_of(self, name, use, shared):
        """Int32 shared address of the copy of an operand that a use takes; 0 for one in tensor memory."""
        operand = self.program.operand(name)
        if not operand.in_shared_memory:
            return Int32(0)
        return shared + self.program.shared[name] + (use & (operand.stages - 1)) * operand.stage_bytes

    @cute.jit
    def reduce(
        self,
        dq_accum: cute.Tensor,
        turns: cute.Tensor,
        mask,
        sequence,
        walk,
        place,
        width: Int32,
        deterministic: Int32,
        shared: Int32,
        barriers,
        columns: Int32,
        tid: Int32,
    ):
        """The reduce warps: dQ of each step leaves tensor memory and is added to dq_accum."""
        first_head, m_first, tiles_m, total = walk
        lane = tid - FIRST_REDUCE * WARP
        head, m = first_head, m_first
        for i in cutlass.range(total, unroll=1):
            for step in self.program.each[Role.REDUCE]:
                use = i + step.at
                if const_expr(isinstance(step, Wait)):
                    barrier.wait(self.program, barriers, step.barrier, use)
                    self.tensor_memory.after_wait()
                elif const_expr(isinstance(step, Act)):
                    if const_expr(step.name == "drain"):
                        turn = self.turn_of(turns, sequence, head, m)
                        target = self.dq_block(dq_accum, turns, sequence, head, m)
                        self.drain(target, turn, mask, m, place[1], width, deterministic, shared, columns, lane)
                    else:
                        self.flush(lane)
                else:
                    signal(self.tensor_memory, barrier.address(self.program, barriers, step.barrier, use))
            last_m = m + 1 == m_first + tiles_m
            head = head + Int32(last_m)
            m = Int32(cutlass.select_(last_m, m_first, m + 1))
        self.flush(lane)

    @cute.jit
    def drain(
        self,
        target: Int64,
        turn: cute.Pointer,
        mask,
        m: Int32,
        n: Int32,
        width: Int32,
        deterministic: Int32,
        shared: Int32,
        columns: Int32,
        lane: Int32,
    ):
        """A tile of dQ to its block of dq_accum, but for padding; when deterministic, after all higher key tiles."""
        program = self.program
        rdQ = cute.make_rmem_tensor(cute.make_layout(DRAIN_COLUMNS), Float32)
        if deterministic != 0:
            if lane == 0:
                # a CTA waits only for CTAs of lower index, and those are started first
                before = tiles_after(mask, m, n)
                done = Int32(0)
                while done < before:
                    done = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
                cute.arch.inline_ptx("fence.proxy.async;")
        for stage in cutlass.range_constexpr(program.head_dim // DRAIN_COLUMNS):
            if stage * DRAIN_COLUMNS < width:
                self.tensor_memory.load(columns + lane // WARP * WARP * LANE + program.dq_column(stage), rdQ)
                buffer = shared + program.shared["dq"] + stage % program.stages_dq * program.dq_stage_bytes
                self.await_copies(program.copies_running(stage), lane)
                for j in cutlass.range_constexpr(0, DRAIN_COLUMNS, 4):
                    store_vector(buffer + j * 4 * program.tile_m + lane * 16, [rdQ[j + x] for x in range(4)])
                cute.arch.inline_ptx("fence.proxy.async.shared::cta;")
                cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=REDUCE_THREADS)
                if lane == 0:
                    cute.arch.inline_ptx(
                        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};\n"
                        "cp.async.bulk.commit_group;",
                        read_only_args=[
                            target + stage * program.dq_stage_bytes,
                            buffer,
                            Int32(program.dq_stage_bytes),
                        ],
                    )
        if deterministic != 0:
            if lane == 0:
                # all of it is in memory, not only read
                cute.arch.inline_ptx("cp.async.bulk.wait_group 0;\nfence.proxy.async;")
                cute.arch.fence_acq_rel_gpu()
                cute.arch.red(turn, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")

    @cute.jit
    def await_copies(self, running: cutlass.Constexpr, lane: Int32):
        """Until the reduce thread's bulk copies have read their memory, but for the last `running`."""
        if lane == 0:
            cute.arch.inline_ptx(f"cp.async.bulk.wait_group.read {running};")
        cute.arch.barrier(barrier_id=REDUCE_BARRIER, number_of_threads=REDUCE_THREADS)

    @cute.jit
    def flush(self, lane: Int32):
        """Until no bulk copy reads shared memory any more."""
        self.await_copies(0, lane)
