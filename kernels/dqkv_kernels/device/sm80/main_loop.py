"""The main loop for mma.sync: P and dS go through shared memory, to the warps that a later product is spread over."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from dqkv_kernels.device.copy import transposed
from dqkv_kernels.device.main_loop import MainLoop
from dqkv_kernels.device.mask import end_m, first_m
from dqkv_kernels.device.softmax import probabilities

MMA_SHAPE = (16, 8, 16)


def tiled_mma(dtype, num_warps, warps_m):
    """mma.sync over num_warps warps, warps_m of them along the rows; 16 columns a warp, as ldmatrix.x4 reads."""
    warps_n = num_warps // warps_m
    return cute.make_tiled_mma(
        warp.MmaF16BF16Op(dtype, Float32, MMA_SHAPE),
        cute.make_layout((warps_m, warps_n, 1)),
        permutation_mnk=(warps_m * 16, warps_n * 16, 16),
    )


def fragment_of(mma, tid, shape):
    """fp32 registers for a thread's part of a result of that shape."""
    return cute.make_rmem_tensor(mma.get_slice(tid).partition_shape_C(shape), Float32)


class Product:
    """acc += A B^T for A (rows, depth) and B (columns, depth) in shared memory, by ldmatrix and mma.sync.

    An operand whose shared memory has depth as its rows is given as its transposed view and read with ldmatrix.trans.
    """

    def __init__(self, mma, tid, dtype, a, b, a_transposed, b_transposed):
        self.mma = mma
        thread = mma.get_slice(tid)
        atom_a = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(a_transposed, 4), dtype)
        atom_b = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(b_transposed, 4), dtype)
        self.copy_a, self.copy_b = (
            cute.make_tiled_copy_A(atom_a, mma),
            cute.make_tiled_copy_B(atom_b, mma),
        )
        slice_a, slice_b = self.copy_a.get_slice(tid), self.copy_b.get_slice(tid)
        self.from_a, self.from_b = slice_a.partition_S(a), slice_b.partition_S(b)  # (copy, rows, depth, stage)
        stage = (None, None, 0)
        self.a = thread.make_fragment_A(thread.partition_A(a[stage]))
        self.b = thread.make_fragment_B(thread.partition_B(b[stage]))
        self.to_a, self.to_b = slice_a.retile(self.a), slice_b.retile(self.b)


def fetch(product, k, stage_a, stage_b):
    """Shared memory to registers, one step of 16 along the depth."""
    cute.copy(product.copy_a, product.from_a[None, None, k, stage_a], product.to_a[None, None, k])
    cute.copy(product.copy_b, product.from_b[None, None, k, stage_b], product.to_b[None, None, k])


def multiply(product, acc, stage_a, stage_b):
    """acc += A B^T; the registers of the next step are fetched before the step's products."""
    steps = cute.size(product.a.shape[2])
    fetch(product, 0, stage_a, stage_b)
    for k in range(steps):
        if k + 1 < steps:
            fetch(product, k + 1, stage_a, stage_b)
        cute.gemm(product.mma, acc, product.a[None, None, k], product.b[None, None, k], acc)


class MainLoop80(MainLoop):
    """The kernel of one tile row: all warps load, multiply and write."""

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
        """mma.sync for S and dP, for dV and dK, and for dQ."""
        warps = self.num_threads // 32
        return tuple(
            tiled_mma(self.dtype, warps, rows)
            for rows in (self.tile.warps_m_s, self.tile.warps_n_kv, self.tile.warps_m_q)
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
        tile_m, tile_n, stages = self.tile.tile_m, self.tile.tile_n, self.tile.stages_q
        group = q.shape[2] // k.shape[2]
        storage = SmemAllocator().allocate(Storage)
        sQ, sdO = self.operand(storage.q, "q"), self.operand(storage.dout, "dout")  # (tile_m, width, stage)
        sK, sV = self.operand(storage.k, "k"), self.operand(storage.v, "v")  # (tile_n, width, 1)
        sP, sdS = self.operand(storage.p, "p"), self.operand(storage.ds, "ds")  # (tile_m, tile_n, 1)
        sLse = storage.lse_log2.get_tensor(cute.make_layout((tile_m, stages)))
        sDelta = storage.delta.get_tensor(cute.make_layout((tile_m, stages)))

        mma_s, mma_kv, mma_q = mmas
        scores = Product(mma_s, tid, self.dtype, sQ, sK, False, False)
        dscores = Product(mma_s, tid, self.dtype, sdO, sV, False, False)
        values = Product(mma_kv, tid, self.dtype, transposed(sP), transposed(sdO), True, True)
        keys = Product(mma_kv, tid, self.dtype, transposed(sdS), transposed(sQ), True, True)
        queries = Product(mma_q, tid, self.dtype, sdS, transposed(sK), False, True)
        rdK = fragment_of(mma_kv, tid, (tile_n, self.tile.head_dim))
        rdV = fragment_of(mma_kv, tid, (tile_n, self.tile.head_dim_v))
        rdK.fill(0.0)
        rdV.fill(0.0)

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

        head, m, stage = first_head, m_first, Int32(0)
        for i in cutlass.range(total, unroll=1):
            # the loads of this stage were started one iteration ago; past the barrier everyone has left the other
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            last_m = m + 1 == m_end
            next_head = head + Int32(last_m)
            next_m = Int32(cutlass.select_(last_m, m_first, m + 1))
            if const_expr(stages > 1):
                if i + 1 < total:
                    self.load_queries(
                        q, dout, lse_log2, delta, storage, sequence, next_head, next_m, (1 - stage, 1 - stage), tid
                    )
                cute.arch.cp_async_commit_group()

            rS = fragment_of(mma_s, tid, (tile_m, tile_n))
            rS.fill(0.0)
            multiply(scores, rS, stage, 0)
            self.softmax(rS, mma_s, mask, sLse, sP, scales, m, n, stage, tid)
            rdP = fragment_of(mma_s, tid, (tile_m, tile_n))
            rdP.fill(0.0)
            multiply(dscores, rdP, stage, 0)
            self.dsoftmax(rS, rdP, mma_s, sDelta, sdS, stage, tid)
            cute.arch.sync_threads()  # P and dS are whole
            multiply(values, rdV, 0, stage)
            multiply(keys, rdK, 0, stage)
            if const_expr(stages == 1):
                cute.arch.sync_threads()  # everyone has left Q and dO
                if i + 1 < total:
                    self.load_queries(
                        q, dout, lse_log2, delta, storage, sequence, next_head, next_m, (Int32(0), Int32(0)), tid
                    )
                cute.arch.cp_async_commit_group()
            rdQ = fragment_of(mma_q, tid, (tile_m, self.tile.head_dim))
            rdQ.fill(0.0)
            multiply(queries, rdQ, 0, 0)
            self.add_dq(rdQ, dq_accum, turns, mask, sequence, head, m, n, deterministic, tid)
            head, m = next_head, next_m
            if const_expr(stages > 1):
                stage = 1 - stage

        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # K and V are no longer read: their memory takes dK and dV
        for j in cutlass.range_constexpr(cute.size(rdK)):
            rdK[j] = rdK[j] * scales[2]
        self.write(rdK, mma_kv, "k", storage.k, dk, sequence, head_kv, n, tid)
        self.write(rdV, mma_kv, "v", storage.v, dv, sequence, head_kv, n, tid)

    @cute.jit
    def softmax(
        self,
        rS: cute.Tensor,
        mma: cute.TiledMma,
        mask,
        sLse: cute.Tensor,
        sP: cute.Tensor,
        scales,
        m: Int32,
        n: Int32,
        stage: Int32,
        tid: Int32,
    ):
        """S in registers becomes P in shared memory; P, times the slope of the softcap if there is one, stays in rS."""
        # (query, key) of each register
        place = mma.get_slice(tid).partition_C(cute.make_identity_tensor((self.tile.tile_m, self.tile.tile_n)))
        rLse = self.of_rows(mma, sLse, stage, tid)
        rP = cute.make_rmem_tensor_like(rS, self.dtype)
        probabilities(rS, rP, rLse, place, mask, scales, m, n, 1, self.softcap)
        self.put(rP, mma, sP, tid)

    @cute.jit
    def dsoftmax(
        self,
        rP: cute.Tensor,
        rdP: cute.Tensor,
        mma: cute.TiledMma,
        sDelta: cute.Tensor,
        sdS: cute.Tensor,
        stage: Int32,
        tid: Int32,
    ):
        """P and dP in registers become dS in shared memory."""
        rDelta = self.of_rows(mma, sDelta, stage, tid)
        for j in cutlass.range_constexpr(cute.size(rdP)):
            rdP[j] = rP[j] * (rdP[j] - rDelta[j])
        self.put(rdP, mma, sdS, tid)

    def of_rows(self, mma, statistic, stage, tid):
        """The statistic (tile_m, stage) of each register's row, for registers that hold (tile_m, tile_n)."""
        tile_m = self.tile.tile_m
        shape = (tile_m, self.tile.tile_n, self.tile.stages_q)
        wide = cute.make_tensor(statistic.iterator, cute.make_layout(shape, stride=(1, 0, tile_m)))
        mine = mma.get_slice(tid).partition_C(wide)[None, None, None, stage]
        registers = cute.make_rmem_tensor_like(mine, Float32)
        cute.autovec_copy(mine, registers)
        return registers
