"""The main loop for wgmma, heads up to 256 wide: dK and dV are transposed, each warpgroup owns half their width.

Two warpgroups could not hold dK and dV of 128 keys by 256 columns. So a tile has 64 keys, S and dP are taken with
queries as rows, half of the keys a warpgroup, and P and dS pass through shared memory.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator

from dqkv_kernels.device.copy import TileCopy, transposed
from dqkv_kernels.device.main_loop import MainLoop
from dqkv_kernels.device.mask import end_m, first_m
from dqkv_kernels.device.seqlen import key_address, row_stride_bytes
from dqkv_kernels.device.sm90.main_loop import MMA_ROWS, WARPGROUP, WARPGROUPS, add_columns, meet, start
from dqkv_kernels.device.softmax import probabilities

ALONG_DEPTH, ALONG_ROWS = OperandMajorMode.K, OperandMajorMode.MN


class WideMainLoop90(MainLoop):
    """The kernel of one tile row: 256 threads, all of which load, multiply and write."""

    def sizes(self, name):
        """(rows, columns, stages) of one operand in shared memory."""
        tile = self.tile
        return {
            "q": (tile.tile_m, tile.head_dim, tile.stages_q),
            "dout": (tile.tile_m, tile.head_dim_v, tile.stages_dout),
            "k": (tile.tile_n, tile.head_dim, 1),
            "v": (tile.tile_n, tile.head_dim_v, 1),
            "p": (tile.tile_m, tile.tile_n, 1),
            "ds": (tile.tile_m, tile.tile_n, 1),
        }[name]

    def tiled_mmas(self):
        """wgmma for S and dP (queries, half the keys), dV^T and dK^T (width, keys), dQ (queries, half the width)."""
        tile = self.tile

        def mma(a_major, b_major, warpgroups, columns):
            return hopper.make_trivial_tiled_mma(
                self.dtype, self.dtype, a_major, b_major, Float32, (warpgroups, 1, 1), (MMA_ROWS, columns)
            )

        return (
            mma(ALONG_DEPTH, ALONG_DEPTH, 1, tile.tile_n // WARPGROUPS),
            mma(ALONG_ROWS, ALONG_ROWS, WARPGROUPS, tile.tile_n),
            mma(ALONG_DEPTH, ALONG_ROWS, 1, tile.head_dim // WARPGROUPS),
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
        tile_m, tile_n = self.tile.tile_m, self.tile.tile_n
        head_dim, head_dim_v = self.tile.head_dim, self.tile.head_dim_v
        group = q.shape[2] // k.shape[2]
        storage = SmemAllocator().allocate(Storage)
        sQ, sdO = self.operand(storage.q, "q"), self.operand(storage.dout, "dout")  # (tile_m, width, stage)
        sK, sV = self.operand(storage.k, "k"), self.operand(storage.v, "v")  # (tile_n, width, 1)
        sP, sdS = self.operand(storage.p, "p"), self.operand(storage.ds, "ds")  # (tile_m, tile_n, 1)
        sLse = storage.lse_log2.get_tensor(cute.make_layout((tile_m, self.tile.stages_q)))
        sDelta = storage.delta.get_tensor(cute.make_layout((tile_m, self.tile.stages_dout)))
        wg = cute.arch.make_warp_uniform(tid // WARPGROUP)
        lane = tid % WARPGROUP
        half_n, half_width = tile_n // WARPGROUPS, head_dim // WARPGROUPS

        mma_s, mma_kv, mma_q = mmas
        of_s, of_kv, of_q = mma_s.get_slice(0), mma_kv.get_slice(wg * WARPGROUP), mma_q.get_slice(0)
        Q, dO = (of_s.make_fragment_A(of_s.partition_A(s)) for s in (sQ, sdO))
        K = of_s.make_fragment_B(of_s.partition_B(cute.local_tile(sK[None, None, 0], (half_n, head_dim), (wg, 0))))
        V = of_s.make_fragment_B(of_s.partition_B(cute.local_tile(sV[None, None, 0], (half_n, head_dim_v), (wg, 0))))
        dO_t, Q_t = (of_kv.make_fragment_A(of_kv.partition_A(transposed(s))) for s in (sdO, sQ))
        P_t, dS_t = (of_kv.make_fragment_B(of_kv.partition_B(transposed(s)[None, None, 0])) for s in (sP, sdS))
        dS = of_q.make_fragment_A(of_q.partition_A(sdS[None, None, 0]))
        K_t = cute.local_tile(transposed(sK)[None, None, 0], (half_width, tile_n), (wg, 0))
        K_t = of_q.make_fragment_B(of_q.partition_B(K_t))
        rS, rdP = (cute.make_rmem_tensor(of_s.partition_shape_C((tile_m, half_n)), Float32) for _ in range(2))
        rdV = cute.make_rmem_tensor(of_kv.partition_shape_C((head_dim_v, tile_n)), Float32)
        rdK = cute.make_rmem_tensor(of_kv.partition_shape_C((head_dim, tile_n)), Float32)
        rdQ = cute.make_rmem_tensor(of_q.partition_shape_C((tile_m, half_width)), Float32)
        # (query, key) of each register of S in the whole tile
        mine = mma_s.get_slice(lane)
        whole = cute.make_identity_tensor((tile_m, tile_n))
        place = mine.partition_C(cute.local_tile(whole, (tile_m, half_n), (0, wg)))

        first_column = wg * half_width  # of this warpgroup's part of dQ
        m_first, m_end = first_m(mask, n), end_m(mask, n)
        tiles_m = cutlass.max(m_end - m_first, Int32(0))
        total = tiles_m * group
        first_head = head_kv * group
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
            meet()  # tile i is loaded, and everyone has left the other stage, P and dS
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
            self.put_half(rP, mma_s, sP, wg, lane)
            meet()  # P is whole
            start(mma_kv, rdV, dO_t[None, None, None, stage], P_t, True)
            warpgroup.wait_group(1)  # dP
            row_delta = self.of_rows(mine, sDelta, half_n, stage)
            for j in cutlass.range_constexpr(cute.size(rdP)):
                rdP[j] = rS[j] * (rdP[j] - row_delta[j])
            rdS = cute.make_rmem_tensor_like(rdP, self.dtype)
            rdS.store(rdP.load().to(self.dtype))
            self.put_half(rdS, mma_s, sdS, wg, lane)
            meet()  # dS is whole
            start(mma_q, rdQ, dS, K_t, False)
            start(mma_kv, rdK, Q_t[None, None, None, stage], dS_t, True)
            warpgroup.wait_group(1)  # dV and dQ
            turn = self.turn_of(turns, sequence, head, m)
            self.await_turn(turn, mask, m, n, deterministic, tid)
            block = self.dq_block(dq_accum, turns, sequence, head, m)
            add_columns(rdQ, block, first_column, Int32(q.shape[3]), tid, self.num_threads, self.tile.red_width)
            self.pass_turn(turn, deterministic, tid)
            warpgroup.wait_group(0)
            head, m, stage = next_head, next_m, 1 - stage

        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # K and V are no longer read: their memory takes dK and dV
        for j in cutlass.range_constexpr(cute.size(rdK)):
            rdK[j] = rdK[j] * scales[2]
        self.write_transposed(rdK, mma_kv, "k", storage.k, dk, sequence, head_kv, n, tid)
        self.write_transposed(rdV, mma_kv, "v", storage.v, dv, sequence, head_kv, n, tid)

    def of_rows(self, thread, statistic, columns, stage):
        """The statistic (tile_m, stage) of each register's query, in registers, for those of a half of S."""
        shape = (self.tile.tile_m, columns, cute.size(statistic.shape[1]))
        wide = cute.make_tensor(statistic.iterator, cute.make_layout(shape, stride=(1, 0, self.tile.tile_m)))
        mine = thread.partition_C(wide)[None, None, None, stage]
        registers = cute.make_rmem_tensor_like(mine, Float32)
        cute.autovec_copy(mine, registers)
        return registers

    def put_half(self, fragment, mma, shared, wg, lane):
        """Writes a warpgroup's half of P or dS, in 16 bits, to its columns of shared memory."""
        columns = self.tile.tile_n // WARPGROUPS
        half = cute.local_tile(shared[None, None, 0], (self.tile.tile_m, columns), (0, wg))
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
            cute.arch.sync_threads()
            TileCopy(tile_n, width, self.num_threads).store(
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
