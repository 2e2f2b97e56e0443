"""The main loop for wgmma, heads up to 128 wide: each of two warpgroups owns half of the keys.

S and dP are taken transposed, keys as rows, so that a warpgroup's P^T and dS^T are the left operands of its part of
dV and dK as they lie in its registers; only dS^T passes through shared memory, because dQ needs all keys. Two steps
overlap: while the products of step i that need dS run, S of step i + 1 is taken.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.memory import SmemAllocator

from dqkv_kernels.device import accumulator
from dqkv_kernels.device.copy import transposed
from dqkv_kernels.device.main_loop import MainLoop
from dqkv_kernels.device.mask import end_m, first_m
from dqkv_kernels.device.softmax import probabilities

WARPGROUP = 128
WARPGROUPS = 2
MMA_ROWS = 64
COLUMNS_A_STEP = 32
"""Columns of dQ that are added or, where they are padding, left out together."""
ALONG_DEPTH, ALONG_ROWS = OperandMajorMode.K, OperandMajorMode.MN


def start(mma, acc, a, b, accumulate):
    """Starts acc (+)= A B^T as one wgmma group; accumulate may be a run-time Boolean."""
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for k in range(cute.size(b.shape[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def add_columns(
    rdQ: cute.Tensor,
    block: cutlass.Int64,
    first_column: Int32,
    head_dim: Int32,
    tid: Int32,
    num_threads: cutlass.Constexpr,
    red_width: cutlass.Constexpr,
):
    """Adds a warpgroup's part of a tile of dQ to its block of dq_accum, but for padding: what L2 takes is what limits.

    rdQ: 64 rows of columns from first_column on; head_dim: the problem's own.
    """
    step = MMA_ROWS * COLUMNS_A_STEP // WARPGROUP
    for c in cutlass.range_constexpr(cute.size(rdQ) // step):
        if first_column + c * COLUMNS_A_STEP < head_dim:
            columns = cute.make_tensor(rdQ.iterator + c * step, cute.make_layout(step))
            accumulator.add(block + c * step * num_threads * 4, columns, tid, num_threads, red_width)


def meet():
    """All threads' copies and stores to shared memory are done and visible to wgmma."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()


class MainLoop90(MainLoop):
    """The kernel of one tile row: 256 threads, all of which load, multiply and write."""

    stages_ds = 2

    def sizes(self, name):
        """(rows, columns, stages) of one operand in shared memory."""
        tile = self.tile
        return {
            "q": (tile.tile_m, tile.head_dim, self.tile.stages_q),
            "dout": (tile.tile_m, tile.head_dim_v, self.tile.stages_dout),
            "k": (tile.tile_n, tile.head_dim, 1),
            "v": (tile.tile_n, tile.head_dim_v, 1),
            "p": (8, 8, 1),  # P never leaves the registers
            "ds": (tile.tile_n, tile.tile_m, self.stages_ds),
        }[name]

    def tiled_mmas(self):
        """wgmma for S^T and dP^T (keys, queries), dV and dK (keys, width), and dQ (queries, width).

        dQ's columns are halved between the warpgroups, or its rows where a tile has 128.
        """
        tile = self.tile

        def mma(a_major, b_major, warpgroups, columns, source=warpgroup.OperandSource.SMEM):
            return hopper.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                a_major,
                b_major,
                Float32,
                (warpgroups, 1, 1),
                (MMA_ROWS, columns),
                a_source=source,
            )

        registers = warpgroup.OperandSource.RMEM
        mma_q = mma(ALONG_ROWS, ALONG_ROWS, 1, tile.head_dim // WARPGROUPS)
        if tile.dq_split == "rows":
            mma_q = mma(ALONG_ROWS, ALONG_ROWS, WARPGROUPS, tile.head_dim)
        return (
            mma(ALONG_DEPTH, ALONG_DEPTH, WARPGROUPS, tile.tile_m),
            mma(ALONG_DEPTH, ALONG_ROWS, WARPGROUPS, tile.head_dim_v, registers),
            mma(ALONG_DEPTH, ALONG_ROWS, WARPGROUPS, tile.head_dim),
            mma_q,
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
        sdS = self.operand(storage.ds, "ds")  # (tile_n, tile_m, stage): transposed
        sLse = storage.lse_log2.get_tensor(cute.make_layout((tile_m, self.tile.stages_q)))
        sDelta = storage.delta.get_tensor(cute.make_layout((tile_m, self.tile.stages_dout)))
        wg = cute.arch.make_warp_uniform(tid // WARPGROUP)

        mma_s, mma_v, mma_k, mma_q = mmas
        of_s, of_v, of_k = (mma.get_slice(wg * WARPGROUP) for mma in (mma_s, mma_v, mma_k))
        K, V = (of_s.make_fragment_A(of_s.partition_A(s[None, None, 0])) for s in (sK, sV))
        Q, dO = (of_s.make_fragment_B(of_s.partition_B(s)) for s in (sQ, sdO))
        dO_t = of_v.make_fragment_B(of_v.partition_B(transposed(sdO)))
        dS_t = of_k.make_fragment_A(of_k.partition_A(sdS))
        Q_t = of_k.make_fragment_B(of_k.partition_B(transposed(sQ)))
        K_t = transposed(sK)[None, None, 0]
        if const_expr(self.tile.dq_split == "rows"):
            of_q = mma_q.get_slice(wg * WARPGROUP)
            rdQ = cute.make_rmem_tensor(of_q.partition_shape_C((tile_m, head_dim)), Float32)
        else:
            of_q = mma_q.get_slice(0)
            K_t = cute.local_tile(K_t, (head_dim // WARPGROUPS, tile_n), (wg, 0))
            rdQ = cute.make_rmem_tensor(of_q.partition_shape_C((tile_m, head_dim // WARPGROUPS)), Float32)
        dS = of_q.make_fragment_A(of_q.partition_A(transposed(sdS)))
        K_t = of_q.make_fragment_B(of_q.partition_B(K_t))
        rS, rdP = (
            cute.make_rmem_tensor(mma_s.get_slice(tid).partition_shape_C((tile_n, tile_m)), Float32) for _ in range(2)
        )
        rdV = cute.make_rmem_tensor(of_v.partition_shape_C((tile_n, head_dim_v)), Float32)
        rdK = cute.make_rmem_tensor(of_k.partition_shape_C((tile_n, head_dim)), Float32)

        # of this warpgroup's part of dQ
        first_column = wg * (head_dim // WARPGROUPS) if const_expr(self.tile.dq_split == "columns") else Int32(0)
        m_first, m_end = first_m(mask, n), end_m(mask, n)
        tiles_m = cutlass.max(m_end - m_first, Int32(0))
        total = tiles_m * group
        first_head = head_kv * group
        self.load_keys(k, v, storage, sequence, head_kv, n, tid)
        if total > 0:
            # tiles 0 and 1 of the walk are loaded ahead, each as one group of copies
            self.load_queries(
                q, dout, lse_log2, delta, storage, sequence, first_head, m_first, (Int32(0), Int32(0)), tid
            )
            cute.arch.cp_async_commit_group()
            head_1 = first_head + Int32(1) // tiles_m
            m_1 = m_first + Int32(1) % tiles_m
            if total > 1:
                self.load_queries(q, dout, lse_log2, delta, storage, sequence, head_1, m_1, (Int32(1), Int32(1)), tid)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(1)
            meet()
            start(mma_s, rS, K, Q[None, None, None, 0], False)
            warpgroup.wait_group(0)  # S
            P = self.softmax(rS, mma_s, mask, sLse, scales, m_first, n, Int32(0), tid)
            start(mma_s, rdP, V, dO[None, None, None, 0], False)
            start(mma_v, rdV, P, dO_t[None, None, None, 0], False)
            warpgroup.wait_group(1)  # dP
            self.dsoftmax(rS, rdP, mma_s, sDelta, sdS, Int32(0), Int32(0), tid)
            warpgroup.wait_group(0)  # dV
            cute.arch.cp_async_wait_group(0)
            meet()  # dS of tile 0 is whole, tile 1 is loaded, dO of tile 0 is free

            head, m = first_head, m_first
            next_head, next_m = head_1, m_1
            stage_q, next_q, stage_dout = Int32(0), Int32(1), Int32(0)
            accumulate = Boolean(False)
            for i in cutlass.range(total - 1, unroll=1):
                next_dout = 1 - stage_dout
                load_q = 3 - stage_q - next_q
                last_m = next_m + 1 == m_end
                load_head = next_head + Int32(last_m)
                load_m = Int32(cutlass.select_(last_m, m_first, next_m + 1))
                if i + 2 < total:
                    self.load_queries(
                        q, dout, lse_log2, delta, storage, sequence, load_head, load_m, (load_q, stage_dout), tid
                    )
                cute.arch.cp_async_commit_group()
                start(mma_q, rdQ, dS[None, None, None, stage_dout], K_t, False)
                start(mma_s, rS, K, Q[None, None, None, next_q], False)
                start(mma_k, rdK, dS_t[None, None, None, stage_dout], Q_t[None, None, None, stage_q], accumulate)
                warpgroup.wait_group(2)  # dQ of tile i
                turn = self.turn_of(turns, sequence, head, m)
                self.await_turn(turn, mask, m, n, deterministic, tid)
                block = self.dq_block(dq_accum, turns, sequence, head, m)
                add_columns(rdQ, block, first_column, Int32(q.shape[3]), tid, self.num_threads, self.tile.red_width)
                self.pass_turn(turn, deterministic, tid)
                if const_expr(self.softcap or tile_m > MMA_ROWS):
                    # the softcap, and S of a tall tile, need the registers that dP would hold meanwhile
                    warpgroup.wait_group(1)  # S of tile i + 1
                    P = self.softmax(rS, mma_s, mask, sLse, scales, next_m, n, next_q, tid)
                    start(mma_s, rdP, V, dO[None, None, None, next_dout], False)
                else:
                    start(mma_s, rdP, V, dO[None, None, None, next_dout], False)
                    warpgroup.wait_group(2)  # S of tile i + 1
                    P = self.softmax(rS, mma_s, mask, sLse, scales, next_m, n, next_q, tid)
                start(mma_v, rdV, P, dO_t[None, None, None, next_dout], True)
                warpgroup.wait_group(1)  # dK of tile i, dP of tile i + 1
                self.dsoftmax(rS, rdP, mma_s, sDelta, sdS, next_dout, next_dout, tid)
                warpgroup.wait_group(0)  # dV of tile i + 1
                cute.arch.cp_async_wait_group(0)
                meet()  # dS of tile i + 1 is whole, tile i + 2 is loaded, Q of tile i and dO of i + 1 are free
                head, m = next_head, next_m
                next_head, next_m = load_head, load_m
                stage_q, next_q, stage_dout = next_q, load_q, next_dout
                accumulate = Boolean(True)

            start(mma_q, rdQ, dS[None, None, None, stage_dout], K_t, False)
            start(mma_k, rdK, dS_t[None, None, None, stage_dout], Q_t[None, None, None, stage_q], accumulate)
            warpgroup.wait_group(0)
            turn = self.turn_of(turns, sequence, head, m)
            self.await_turn(turn, mask, m, n, deterministic, tid)
            block = self.dq_block(dq_accum, turns, sequence, head, m)
            add_columns(rdQ, block, first_column, Int32(q.shape[3]), tid, self.num_threads, self.tile.red_width)
            self.pass_turn(turn, deterministic, tid)
        else:
            # copies that are in no group are not waited for, and would land in what K's and V's memory holds next
            cute.arch.cp_async_commit_group()
            rdK.fill(0.0)
            rdV.fill(0.0)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # K and V are no longer read: their memory takes dK and dV
        for j in cutlass.range_constexpr(cute.size(rdK)):
            rdK[j] = rdK[j] * scales[2]
        self.write(rdK, mma_k, "k", storage.k, dk, sequence, head_kv, n, tid)
        self.write(rdV, mma_v, "v", storage.v, dv, sequence, head_kv, n, tid)

    @cute.jit
    def softmax(
        self,
        rS: cute.Tensor,
        mma: cute.TiledMma,
        mask,
        sLse: cute.Tensor,
        scales,
        m: Int32,
        n: Int32,
        stage: Int32,
        tid: Int32,
    ):
        """S^T becomes P^T (times the slope of the softcap, if any); returns P^T in 16 bits, as a left operand."""
        tile_m, tile_n = self.tile.tile_m, self.tile.tile_n
        # (key, query) of each register
        place = mma.get_slice(tid).partition_C(cute.make_identity_tensor((tile_n, tile_m)))
        lse_log2 = self.of_columns(mma, sLse, stage, tid)
        rP = cute.make_rmem_tensor_like(rS, self.dtype)
        probabilities(rS, rP, lse_log2, place, mask, scales, m, n, 0, self.softcap)
        # registers of a result (2, 2, columns / 8) read as those of a left operand ((2, 2, 2), rows, depth / 16)
        layout = cute.make_layout(((2, 2, 2), 1, tile_m // 16), stride=((1, 2, 4), 0, 8))
        return cute.make_tensor(rP.iterator, layout)

    @cute.jit
    def dsoftmax(
        self,
        rP: cute.Tensor,
        rdP: cute.Tensor,
        mma: cute.TiledMma,
        sDelta: cute.Tensor,
        sdS: cute.Tensor,
        stage: Int32,
        stage_ds: Int32,
        tid: Int32,
    ):
        """P^T and dP^T in registers become dS^T in shared memory."""
        delta = self.of_columns(mma, sDelta, stage, tid)
        for j in cutlass.range_constexpr(cute.size(rdP)):
            rdP[j] = rP[j] * (rdP[j] - delta[j])
        rdS = cute.make_rmem_tensor_like(rdP, self.dtype)
        rdS.store(rdP.load().to(self.dtype))
        store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma)
        to = store.get_slice(tid)
        cute.copy(store, to.retile(rdS), to.partition_D(sdS)[None, None, None, stage_ds])

    def of_columns(self, mma, statistic, stage, tid):
        """The statistic (tile_m, stage) of each register's query, in shared memory, for registers that hold S^T."""
        shape = (self.tile.tile_n, self.tile.tile_m, cute.size(statistic.shape[1]))
        wide = cute.make_tensor(statistic.iterator, cute.make_layout(shape, stride=(0, 1, self.tile.tile_m)))
        return mma.get_slice(tid).partition_C(wide)[None, None, None, stage]
