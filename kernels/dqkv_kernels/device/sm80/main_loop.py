"""The main loop for mma.sync: a CTA owns tile_n keys of a key head and walks the queries of all heads that share it.

With S = Q K^T, P = exp2(scaled S - lse_log2), dP = dO V^T and dS = P (dP - delta), an iteration adds P^T dO to dV and
dS^T Q to dK, which stay in registers until the end, and dS K to dq_accum, in fp32 atomics. P and dS pass through shared
memory in 16 bits, because each of the three products that read them is spread over the warps in its own way.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from dqkv_kernels.device import accumulator
from dqkv_kernels.device.copy import TileCopy, tile_layout, tile_swizzle, transposed
from dqkv_kernels.device.mask import Mask, end_m, first_m, is_full, sees, tiles_before
from dqkv_kernels.device.seqlen import Sequence, key_address, padded_index, query_address, row_stride_bytes

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


class MainLoop:
    """The kernel of one tile row. dtype: of q, k, v, dout; grad_dtype: of dk, dv; softcap: whether there is one."""

    def __init__(self, tile, dtype, grad_dtype, softcap):
        self.tile, self.dtype, self.grad_dtype, self.softcap = tile, dtype, grad_dtype, softcap
        self.num_threads = tile.num_threads

    def sizes(self, name):
        """(rows, columns, stages) of one operand in shared memory."""
        tile = self.tile
        return {
            "q": (tile.tile_m, tile.head_dim, tile.num_stages),
            "dout": (tile.tile_m, tile.head_dim_v, tile.num_stages),
            "k": (tile.tile_n, tile.head_dim, 1),
            "v": (tile.tile_n, tile.head_dim_v, 1),
            "p": (tile.tile_m, tile.tile_n, 1),
        }[name]

    def operand(self, memory, name):
        """The tensor (rows, columns, stage) of one operand in its part of shared memory."""
        sizes = self.sizes(name)
        return memory.get_tensor(tile_layout(*sizes), swizzle=tile_swizzle(sizes[1]))

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
        """Launches a CTA for each of tiles_k tiles of keys, key heads and sequences.

        q (batches, rows, num_heads_q, head_dim), k, v, dout, dk, dv likewise; lse_log2, delta (num_heads_q, padded
        rows); dq_accum (num_heads_q, padded rows * padded head_dim); turns (num_heads_q, padded rows / tile_m) int32,
        zero; sequences (batch_size, 8). Without softcap the exponent is outer_scale * S - lse_log2; with it,
        outer_scale * tanh(S * softmax_scale / softcap) - lse_log2, inner_scale = 2 log2(e) softmax_scale / softcap.
        """
        size_q, size_dout, size_k, size_v, size_p = (
            math.prod(self.sizes(name)) for name in ("q", "dout", "k", "v", "p")
        )
        stats = self.tile.tile_m * self.tile.num_stages

        @cute.struct
        class Storage:
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, size_k], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, size_v], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, size_q], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[self.dtype, size_dout], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, size_p], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, size_p], 1024]
            lse_log2: cute.struct.Align[cute.struct.MemRange[Float32, stats], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, stats], 128]

        tile = self.tile
        num_warps = self.num_threads // 32
        mma_s = tiled_mma(self.dtype, num_warps, tile.warps_m_s)
        mma_kv = tiled_mma(self.dtype, num_warps, tile.warps_n_kv)
        mma_q = tiled_mma(self.dtype, num_warps, tile.warps_m_q)
        blocks = tiles_k * k.shape[2] * sequences.shape[0]
        self.kernel(
            q,
            k,
            v,
            dout,
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
            (mma_s, mma_kv, mma_q),
            Storage,
        ).launch(grid=[blocks, 1, 1], block=[self.num_threads, 1, 1], stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
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
        scales: tuple,
        window: tuple,
        deterministic: Int32,
        mmas: tuple,
        Storage: cutlass.Constexpr,
    ):
        """One CTA: grid (tiles_k * num_heads_kv * batch_size), the key tile changes fastest: low tiles start first."""
        tid = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        n = block % tiles_k
        head_kv = (block // tiles_k) % k.shape[2]
        sequence = Sequence(sequences, block // tiles_k // k.shape[2])
        mask = Mask(sequence, window, self.tile.tile_m, self.tile.tile_n)
        if n * self.tile.tile_n < sequence.seqlen_k:
            self.walk(
                q,
                k,
                v,
                dout,
                lse_log2,
                delta,
                dq_accum,
                turns,
                dk,
                dv,
                sequence,
                mask,
                head_kv,
                n,
                scales,
                deterministic,
                mmas,
                Storage,
                tid,
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
        tile_m, tile_n, stages = self.tile.tile_m, self.tile.tile_n, self.tile.num_stages
        group = q.shape[2] // k.shape[2]
        storage = SmemAllocator().allocate(Storage)
        sQ, sdO = self.operand(storage.q, "q"), self.operand(storage.dout, "dout")  # (tile_m, width, stage)
        sK, sV = self.operand(storage.k, "k"), self.operand(storage.v, "v")  # (tile_n, width, 1)
        sP, sdS = self.operand(storage.p, "p"), self.operand(storage.ds, "p")  # (tile_m, tile_n, 1)
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
            self.load_queries(q, dout, lse_log2, delta, storage, sequence, first_head, m_first, Int32(0), tid)
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
                    self.load_queries(q, dout, lse_log2, delta, storage, sequence, next_head, next_m, 1 - stage, tid)
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
                    self.load_queries(q, dout, lse_log2, delta, storage, sequence, next_head, next_m, Int32(0), tid)
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
        self.write(rdK, mma_kv, sK, storage.k, dk, sequence, head_kv, n, tid)
        self.write(rdV, mma_kv, sV, storage.v, dv, sequence, head_kv, n, tid)

    @cute.jit
    def load_keys(self, k: cute.Tensor, v: cute.Tensor, storage, sequence, head, n: Int32, tid: Int32):
        """Starts the copies of tile n of K and V."""
        row = n * self.tile.tile_n
        rows = sequence.seqlen_k - row
        for tensor, memory, width in ((k, storage.k, self.tile.head_dim), (v, storage.v, self.tile.head_dim_v)):
            TileCopy(self.tile.tile_n, width, self.num_threads).load(
                Int32(memory.data_ptr().toint()),
                key_address(sequence, tensor, head, row),
                row_stride_bytes(tensor),
                (rows, tensor.shape[3]),
                tid,
            )

    @cute.jit
    def load_queries(
        self,
        q: cute.Tensor,
        dout: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        storage,
        sequence,
        head: Int32,
        m: Int32,
        stage: Int32,
        tid: Int32,
    ):
        """Starts the copies of tile m of Q, dO, lse_log2 and delta into a stage."""
        tile_m = self.tile.tile_m
        row = m * tile_m
        rows = sequence.seqlen_q - row
        for tensor, memory, width in ((q, storage.q, self.tile.head_dim), (dout, storage.dout, self.tile.head_dim_v)):
            TileCopy(tile_m, width, self.num_threads).load(
                Int32(memory.data_ptr().toint()) + stage * (tile_m * width * 2),
                query_address(sequence, tensor, head, row),
                row_stride_bytes(tensor),
                (rows, tensor.shape[3]),
                tid,
            )
        # both statistics are padded to whole tiles, so nothing is tested; one thread moves four rows
        index = padded_index(sequence, Int64(lse_log2.shape[1]), head, row)
        for place, (tensor, memory) in enumerate(((lse_log2, storage.lse_log2), (delta, storage.delta))):
            lane = tid - place * (tile_m // 4)
            target = Int32(memory.data_ptr().toint()) + stage * (tile_m * 4) + lane * 16
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[target, tensor.iterator.toint() + index * 4 + Int64(lane * 16)],
                predicate=(lane >= 0) & (lane < tile_m // 4),
            )

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
        tile_m, tile_n = self.tile.tile_m, self.tile.tile_n
        inner_scale, outer_scale, _ = scales
        # (row, column) of each register
        place = mma.get_slice(tid).partition_C(cute.make_identity_tensor((tile_m, tile_n)))
        rLse = self.of_rows(mma, sLse, stage, tid)
        if const_expr(self.softcap):
            # element by element, so that two fp32 values of all elements are never alive at once
            rP = cute.make_rmem_tensor_like(rS, self.dtype)
            for j in cutlass.range_constexpr(cute.size(rS)):
                # tanh(x) = 1 - 2 / (exp(2 x) + 1): absolute error 2e-7, where tanh.approx has 5e-4
                t = 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(rS[j] * inner_scale, fastmath=True) + 1.0)
                p = cute.math.exp2(t * outer_scale - rLse[j], fastmath=True)
                seen = sees(mask, m * tile_m + place[j][0], n * tile_n + place[j][1])
                p = Float32(cutlass.select_(seen, p, Float32(0.0)))
                rP[j] = p.to(self.dtype)
                rS[j] = p * (1.0 - t * t)
            self.put(rP, mma, sP, tid)
        else:
            for j in cutlass.range_constexpr(cute.size(rS)):
                rS[j] = rS[j] * outer_scale - rLse[j]
            if not is_full(mask, m, n):
                for j in cutlass.range_constexpr(cute.size(rS)):
                    seen = sees(mask, m * tile_m + place[j][0], n * tile_n + place[j][1])
                    # the exponent may be anything where nothing is seen: -inf makes P zero whatever lse_log2 is
                    rS[j] = Float32(cutlass.select_(seen, rS[j], Float32(float("-inf"))))
            for j in cutlass.range_constexpr(cute.size(rS)):
                rS[j] = cute.math.exp2(rS[j], fastmath=True)
            self.put(rS, mma, sP, tid)

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
        shape = (tile_m, self.tile.tile_n, self.tile.num_stages)
        wide = cute.make_tensor(statistic.iterator, cute.make_layout(shape, stride=(1, 0, tile_m)))
        mine = mma.get_slice(tid).partition_C(wide)[None, None, None, stage]
        registers = cute.make_rmem_tensor_like(mine, Float32)
        cute.autovec_copy(mine, registers)
        return registers

    def put(self, fragment, mma, shared, tid):
        """Rounds registers to the dtype of `shared` (rows, columns, 1) and writes them there."""
        rounded = cute.make_rmem_tensor_like(fragment, shared.element_type)
        rounded.store(fragment.load().to(shared.element_type))
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), shared.element_type, num_bits_per_copy=32)
        copy = cute.make_tiled_copy_C(atom, mma)
        to = copy.get_slice(tid)
        cute.copy(copy, to.retile(rounded), to.partition_D(shared[None, None, 0]))

    @cute.jit
    def add_dq(
        self,
        rdQ: cute.Tensor,
        dq_accum: cute.Tensor,
        turns: cute.Tensor,
        mask,
        sequence,
        head: Int32,
        m: Int32,
        n: Int32,
        deterministic: Int32,
        tid: Int32,
    ):
        """Adds a tile to dq_accum; when deterministic, after all lower key tiles have added theirs."""
        tile_m = self.tile.tile_m
        padded_rows = Int64(turns.shape[1]) * tile_m
        index = padded_index(sequence, padded_rows, head, m * tile_m)
        turn = turns.iterator + (Int64(head) * Int64(turns.shape[1]) + sequence.padded_row // tile_m + Int64(m))
        if deterministic != 0:
            if tid == 0:
                # a CTA waits only for CTAs of lower index, and those are started first
                before = tiles_before(mask, m, n)
                done = Int32(0)
                while done < before:
                    done = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
            cute.arch.sync_threads()
        accumulator.add(
            dq_accum.iterator.toint() + index * (self.tile.head_dim * 4),
            rdQ,
            tid,
            self.num_threads,
            self.tile.red_width,
        )
        if deterministic != 0:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_threads()
            if tid == 0:
                cute.arch.red(turn, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")

    @cute.jit
    def write(
        self,
        fragment: cute.Tensor,
        mma: cute.TiledMma,
        shared: cute.Tensor,
        memory,
        gradient: cute.Tensor,
        sequence,
        head: Int32,
        n: Int32,
        tid: Int32,
    ):
        """A tile of dK or dV to global memory: through `shared` in 16 bits, straight from registers in fp32."""
        tile_n = self.tile.tile_n
        row = n * tile_n
        rows = sequence.seqlen_k - row
        address = key_address(sequence, gradient, head, row)
        pitch = row_stride_bytes(gradient)
        width = cute.size(shared.shape[1])
        if const_expr(self.grad_dtype is Float32):
            place = mma.get_slice(tid).partition_C(cute.make_identity_tensor((tile_n, width)))
            write_pairs(fragment, place, address, pitch, (rows, gradient.shape[3]))
        else:
            self.put(fragment, mma, shared, tid)
            cute.arch.sync_threads()
            TileCopy(tile_n, width, self.num_threads).store(
                Int32(memory.data_ptr().toint()), address, pitch, (rows, gradient.shape[3]), tid
            )


def write_pairs(fragment, place, address, pitch, limits):
    """Writes fp32 registers, two neighbouring columns a store, but for rows and columns past `limits`."""
    for j in range(0, cute.size(fragment), 2):
        row, column = place[j]
        exists = (row < limits[0]) & (column < limits[1])
        cute.arch.inline_ptx(
            "st.global.v2.f32 [{$r0}], { {$r1}, {$r2} };",
            read_only_args=[address + Int64(row) * pitch + Int64(column * 4), fragment[j], fragment[j + 1]],
            predicate=exists,
        )
