"""The main loop for wgmma, heads up to 256 wide: dK and dV are transposed, each warpgroup owns half their width.

Two warpgroups could not hold dK and dV of 128 keys by 256 columns. So a tile has 64 keys, S and dP are taken with
queries as rows, half of the keys a warpgroup, and P and dS pass through shared memory. dQ of so few keys keeps the
atomics busy all the time: a third warpgroup takes it and adds it, so that nobody else waits for them.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator

from dqkv_kernels.device import accumulator
from dqkv_kernels.device.copy import TileCopy, transposed
from dqkv_kernels.device.main_loop import MainLoop
from dqkv_kernels.device.mask import end_m, first_m
from dqkv_kernels.device.seqlen import key_address, row_stride_bytes
from dqkv_kernels.device.sm90.main_loop import MMA_ROWS, WARPGROUP, WARPGROUPS, start
from dqkv_kernels.device.softmax import probabilities

ALONG_DEPTH, ALONG_ROWS = OperandMajorMode.K, OperandMajorMode.MN


COMPUTE = 256
"""Threads of the two warpgroups that load, take S, dP, dV and dK, and write; the other 128 take dQ and add it."""
COMPUTE_REGISTERS, ADDER_REGISTERS = 200, 104
"""A CTA of 384 threads is given 168 registers a thread: 200 + 200 + 104 = 3 * 168, and more would wait for ever."""
DQ_COLUMNS = 64
"""Columns of dQ that the adding warpgroup holds at a time."""
# named barriers; 0 is everyone's. Of two, the second is for the second buffer of dS.
COMPUTE_BARRIER, ADDER_BARRIER, DS_WHOLE, DS_FREE = 1, 2, 3, 5


class WideMainLoop90(MainLoop):
    """The kernel of one tile row: three warpgroups in two roles."""

    def sizes(self, name):
        """(rows, columns, stages) of one operand in shared memory."""
        tile = self.tile
        return {
            "q": (tile.tile_m, tile.head_dim, tile.stages_q),
            "dout": (tile.tile_m, tile.head_dim_v, tile.stages_dout),
            "k": (tile.tile_n, tile.head_dim, 1),
            "v": (tile.tile_n, tile.head_dim_v, 1),
            "p": (tile.tile_m, tile.tile_n, 1),
            "ds": (tile.tile_m, tile.tile_n, 2),
        }[name]

    def tiled_mmas(self):
        """wgmma for S and dP (queries, half the keys), dV^T and dK^T (width, keys), dQ (queries, 64 columns)."""
        tile = self.tile

        def mma(a_major, b_major, warpgroups, columns):
            return hopper.make_trivial_tiled_mma(
                self.dtype, self.dtype, a_major, b_major, Float32, (warpgroups, 1, 1), (MMA_ROWS, columns)
            )

        return (
            mma(ALONG_DEPTH, ALONG_DEPTH, 1, tile.tile_n // WARPGROUPS),
            mma(ALONG_ROWS, ALONG_ROWS, WARPGROUPS, tile.tile_n),
            mma(ALONG_DEPTH, ALONG_ROWS, 1, DQ_COLUMNS),
        )

    @cute.jit
    def walk(
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
        sequence,
        mask,
        head_kv: Int32,
        n: Int32,
        scales,
        deterministic: Int32,
        mmas,
        Storage: cutlass.Constexpr,
        tid: Int32,
    ):
        """Tile n of a key head: all its queries, then dK and dV."""
        group = q.shape[2] // k.shape[2]
        storage = SmemAllocator().allocate(Storage)
        m_first, m_end = first_m(mask, n), end_m(mask, n)
        total = cutlass.max(m_end - m_first, Int32(0)) * group
        wg = cute.arch.make_warp_uniform(tid // WARPGROUP)
        if wg < WARPGROUPS:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            self.compute(
                q,
                k,
                v,
                dout,
                lse_log2,
                delta,
                dk,
                dv,
                sequence,
                mask,
                head_kv,
                n,
                m_first,
                m_end,
                total,
                scales,
                mmas,
                storage,
                wg,
                tid,
            )
        else:
            cute.arch.setmaxregister_decrease(ADDER_REGISTERS)
            self.add(
                dq_accum,
                turns,
                sequence,
                mask,
                head_kv * group,
                n,
                m_first,
                m_end,
                total,
                deterministic,
                mmas,
                storage,
                tid - COMPUTE,
            )

    @cute.jit
    def compute(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        sequence,
        mask,
        head_kv: Int32,
        n: Int32,
        m_first: Int32,
        m_end: Int32,
        total: Int32,
        scales,
        mmas,
        storage,
        wg: Int32,
        tid: Int32,
    ):
        """The role of two warpgroups: loads, S, P, dP, dS, dV and dK of each tile of queries, then writes dK and dV."""
        tile_m, tile_n = self.tile.tile_m, self.tile.tile_n
        head_dim, head_dim_v = self.tile.head_dim, self.tile.head_dim_v
        sQ, sdO = self.operand(storage.q, "q"), self.operand(storage.dout, "dout")  # (tile_m, width, stage)
        sK, sV = self.operand(storage.k, "k"), self.operand(storage.v, "v")  # (tile_n, width, 1)
        sP, sdS = self.operand(storage.p, "p"), self.operand(storage.ds, "ds")  # (tile_m, tile_n, stage)
        sLse = storage.lse_log2.get_tensor(cute.make_layout((tile_m, self.tile.stages_q)))
        sDelta = storage.delta.get_tensor(cute.make_layout((tile_m, self.tile.stages_dout)))
        lane = tid % WARPGROUP
        half_n = tile_n // WARPGROUPS

        mma_s, mma_kv, _ = mmas
        of_s, of_kv = mma_s.get_slice(0), mma_kv.get_slice(wg * WARPGROUP)
        Q, dO = (of_s.make_fragment_A(of_s.partition_A(s)) for s in (sQ, sdO))
        K = of_s.make_fragment_B(of_s.partition_B(cute.local_tile(sK[None, None, 0], (half_n, head_dim), (wg, 0))))
        V = of_s.make_fragment_B(of_s.partition_B(cute.local_tile(sV[None, None, 0], (half_n, head_dim_v), (wg, 0))))
        dO_t, Q_t = (of_kv.make_fragment_A(of_kv.partition_A(transposed(s))) for s in (sdO, sQ))
        P_t, dS_t = (of_kv.make_fragment_B(of_kv.partition_B(transposed(s))) for s in (sP, sdS))
        rS, rdP = (cute.make_rmem_tensor(of_s.partition_shape_C((tile_m, half_n)), Float32) for _ in range(2))
        rdV = cute.make_rmem_tensor(of_kv.partition_shape_C((head_dim_v, tile_n)), Float32)
        rdK = cute.make_rmem_tensor(of_kv.partition_shape_C((head_dim, tile_n)), Float32)
        # (query, key) of each register of S in the whole tile
        mine = mma_s.get_slice(lane)
        whole = cute.make_identity_tensor((tile_m, tile_n))
        place = mine.partition_C(cute.local_tile(whole, (tile_m, half_n), (0, wg)))

        first_head = head_kv * (q.shape[2] // k.shape[2])
        self.load_keys(k, v, storage, sequence, head_kv, n, tid)
        if total > 0:
            self.load_queries(
                q, dout, lse_log2, delta, storage, sequence, first_head, m_first, (Int32(0), Int32(0)), tid
            )
        cute.arch.cp_async_commit_group()
        rdK.fill(0.0)
        rdV.fill(0.0)

        head, m, stage = first_head, m_first, Int32(0)
        for i in cutlass.range(total, unroll=1):
            cute.arch.cp_async_wait_group(0)
            self.meet_compute()  # tile i is loaded, and both have left the other stage and P
            start(mma_s, rS, Q[None, None, None, stage], K, False)
            start(mma_s, rdP, dO[None, None, None, stage], V, False)
            last_m = m + 1 == m_end
            next_head = head + Int32(last_m)
            next_m = Int32(cutlass.select_(last_m, m_first, m + 1))
            if i + 1 < total:
                self.load_queries(
                    q, dout, lse_log2, delta, storage, sequence, next_head, next_m, (1 - stage, 1 - stage), tid
                )
            cute.arch.cp_async_commit_group()
            warpgroup.wait_group(1)  # S
            rP = cute.make_rmem_tensor_like(rS, self.dtype)
            lse = self.of_rows(mine, sLse, half_n, stage)
            probabilities(rS, rP, lse, place, mask, scales, m, n, 1, self.softcap)
            self.put_half(rP, mma_s, sP, Int32(0), wg, lane)
            self.meet_compute()  # P is whole
            start(mma_kv, rdV, dO_t[None, None, None, stage], P_t[None, None, None, 0], True)
            warpgroup.wait_group(1)  # dP
            row_delta = self.of_rows(mine, sDelta, half_n, stage)
            for j in cutlass.range_constexpr(cute.size(rdP)):
                rdP[j] = rS[j] * (rdP[j] - row_delta[j])
            rdS = cute.make_rmem_tensor_like(rdP, self.dtype)
            rdS.store(rdP.load().to(self.dtype))
            if i > 1:
                # the adders have taken what this buffer of dS held two tiles ago
                cute.arch.barrier(barrier_id=DS_FREE + stage, number_of_threads=self.num_threads)
            self.put_half(rdS, mma_s, sdS, stage, wg, lane)
            self.meet_compute()  # dS is whole
            cute.arch.barrier_arrive(barrier_id=DS_WHOLE + stage, number_of_threads=self.num_threads)
            start(mma_kv, rdK, Q_t[None, None, None, stage], dS_t[None, None, None, stage], True)
            warpgroup.wait_group(0)
            head, m, stage = next_head, next_m, 1 - stage

        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # nobody reads K and V any more: their memory takes dK and dV
        for j in cutlass.range_constexpr(cute.size(rdK)):
            rdK[j] = rdK[j] * scales[2]
        self.write_transposed(rdK, mma_kv, "k", storage.k, dk, sequence, head_kv, n, tid)
        self.write_transposed(rdV, mma_kv, "v", storage.v, dv, sequence, head_kv, n, tid)

    @cute.jit
    def add(
        self,
        dq_accum: cute.Tensor,
        turns: cute.Tensor,
        sequence,
        mask,
        first_head: Int32,
        n: Int32,
        m_first: Int32,
        m_end: Int32,
        total: Int32,
        deterministic: Int32,
        mmas,
        storage,
        lane: Int32,
    ):
        """The role of the third warpgroup: dQ of each tile of queries, 64 columns at a time, added to dq_accum.

        It writes no shared memory, so it never has to wait for its own atomics.
        """
        tile_m, tile_n, head_dim = self.tile.tile_m, self.tile.tile_n, self.tile.head_dim
        sK, sdS = self.operand(storage.k, "k"), self.operand(storage.ds, "ds")
        mma_q = mmas[2]
        of_q = mma_q.get_slice(0)
        dS = of_q.make_fragment_A(of_q.partition_A(sdS))
        K_t = transposed(sK)[None, None, 0]
        chunks = head_dim // DQ_COLUMNS
        K_ts = [
            of_q.make_fragment_B(of_q.partition_B(cute.local_tile(K_t, (DQ_COLUMNS, tile_n), (c, 0))))
            for c in range(chunks)
        ]
        rdQ = [cute.make_rmem_tensor(of_q.partition_shape_C((tile_m, DQ_COLUMNS)), Float32) for _ in range(2)]
        registers = tile_m * DQ_COLUMNS // WARPGROUP
        half_chunks = chunks // self.tile.dq_parts
        head, m, stage = first_head, m_first, Int32(0)
        for i in cutlass.range(total, unroll=1):
            turn = self.turn_of(turns, sequence, head, m)
            block = self.dq_block(dq_accum, turns, sequence, head, m)
            self.await_turn(turn, mask, m, n, deterministic, lane)
            cute.arch.barrier(barrier_id=DS_WHOLE + stage, number_of_threads=self.num_threads)
            start(mma_q, rdQ[0], dS[None, None, None, stage], K_ts[0], False)
            for c in cutlass.range_constexpr(chunks):
                if const_expr(c + 1 < chunks):
                    start(mma_q, rdQ[(c + 1) % 2], dS[None, None, None, stage], K_ts[c + 1], False)
                    warpgroup.wait_group(1)
                else:
                    warpgroup.wait_group(0)
                    if i + 2 < total:
                        cute.arch.barrier_arrive(barrier_id=DS_FREE + stage, number_of_threads=self.num_threads)
                # in dq_accum each half of the columns lies as one of two warpgroups would hold it
                part, place = c // half_chunks, c % half_chunks
                accumulator.add(
                    block + place * registers * self.tile.dq_threads * 4,
                    rdQ[c % 2],
                    lane + part * WARPGROUP,
                    self.tile.dq_threads,
                    self.tile.red_width,
                )
            self.pass_turn(turn, deterministic, lane)
            last_m = m + 1 == m_end
            head = head + Int32(last_m)
            m = Int32(cutlass.select_(last_m, m_first, m + 1))
            stage = 1 - stage
        cute.arch.sync_threads()

    def meet_compute(self):
        """The compute warpgroups' copies and stores to shared memory are done and visible to wgmma."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet_writers()

    def meet_writers(self):
        """A barrier of the compute warpgroups."""
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=COMPUTE)

    def meet_adders(self):
        """A barrier of the third warpgroup."""
        cute.arch.barrier(barrier_id=ADDER_BARRIER, number_of_threads=WARPGROUP)

    def of_rows(self, thread, statistic, columns, stage):
        """The statistic (tile_m, stage) of each register's query, in registers, for those of a half of S."""
        shape = (self.tile.tile_m, columns, cute.size(statistic.shape[1]))
        wide = cute.make_tensor(statistic.iterator, cute.make_layout(shape, stride=(1, 0, self.tile.tile_m)))
        mine = thread.partition_C(wide)[None, None, None, stage]
        registers = cute.make_rmem_tensor_like(mine, Float32)
        cute.autovec_copy(mine, registers)
        return registers

    def put_half(self, fragment, mma, shared, stage, wg, lane):
        """Writes a warpgroup's half of P or dS, in 16 bits, to its columns of a stage of shared memory."""
        columns = self.tile.tile_n // WARPGROUPS
        half = cute.local_tile(shared[None, None, stage], (self.tile.tile_m, columns), (0, wg))
        store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma)
        to = store.get_slice(lane)
        cute.copy(store, to.retile(fragment), to.partition_D(half))

    @cute.jit
    def write_transposed(
        self,
        fragment: cute.Tensor,
        mma: cute.TiledMma,
        name: cutlass.Constexpr,
        memory,
        gradient: cute.Tensor,
        sequence,
        head: Int32,
        n: Int32,
        tid: Int32,
    ):
        """A tile of dK or dV, held as (width, keys), to global memory: as `write`, but element by element."""
        tile_n = self.tile.tile_n
        row = n * tile_n
        rows = sequence.seqlen_k - row
        address = key_address(sequence, gradient, head, row)
        pitch = row_stride_bytes(gradient)
        width = self.sizes(name)[1]
        thread = mma.get_slice(tid)
        if const_expr(self.grad_dtype is Float32):
            place = thread.partition_C(cute.make_identity_tensor((width, tile_n)))
            write_elements(fragment, place, address, pitch, (rows, gradient.shape[3]))
        else:
            rounded = cute.make_rmem_tensor_like(fragment, self.grad_dtype)
            rounded.store(fragment.load().to(self.grad_dtype))
            to = thread.partition_C(transposed(self.operand(memory, name))[None, None, 0])
            for j in cutlass.range_constexpr(cute.size(rounded)):
                to[j] = rounded[j]
            self.meet_writers()
            TileCopy(tile_n, width, self.work_threads).store(
                Int32(memory.data_ptr().toint()), address, pitch, (rows, gradient.shape[3]), tid
            )


def write_elements(fragment, place, address, pitch, limits):
    """Writes fp32 registers whose place is (column, row), but for rows and columns past `limits`."""
    for j in range(cute.size(fragment)):
        column, row = place[j]
        cute.arch.inline_ptx(
            "st.global.f32 [{$r0}], {$r1};",
            read_only_args=[address + cutlass.Int64(row) * pitch + cutlass.Int64(column * 4), fragment[j]],
            predicate=(row < limits[0]) & (column < limits[1]),
        )
