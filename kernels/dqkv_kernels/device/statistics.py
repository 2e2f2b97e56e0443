"""softmax_lse from q and k, for a request without it: log of each row's sum of exp(logit), the sink's included."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from dqkv_kernels.device.copy import TileCopy, tile_layout, tile_swizzle
from dqkv_kernels.device.mask import Mask, end_n, first_n, is_full, sees, sink_tiles
from dqkv_kernels.device.seqlen import Sequence, key_address, query_address, row_stride_bytes, statistic
from dqkv_kernels.device.sm80.main_loop import Product, multiply, tiled_mma

INFINITY = float("inf")
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


class Statistics:
    """The kernel of one padded head_dim: four warps, 16 rows a warp, two tiles of keys in shared memory."""

    tile_m, tile_n, num_threads, num_stages = 64, 64, 128, 2

    def __init__(self, head_dim, dtype, softcap):
        self.head_dim, self.dtype, self.softcap = head_dim, dtype, softcap

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        sink: cute.Tensor,
        softmax_lse: cute.Tensor,
        sequences: cute.Tensor,
        tiles_q: Int32,
        inner_scale: Float32,
        outer_scale: Float32,
        left: Int32,
        right: Int32,
        sink_tokens: Int32,
        has_sink: Int32,
        stream,
    ):
        """Launches a CTA for each of tiles_q tiles of queries, query heads and sequences.

        q (batches, rows, num_heads_q, head_dim), k likewise; sink (num_heads_q,) fp32, not read unless has_sink;
        softmax_lse (batches, num_heads_q, rows), -inf for a row without keys and sink. The scales are the main loop's.
        """
        layout_q = tile_layout(self.tile_m, self.head_dim)
        layout_k = tile_layout(self.tile_n, self.head_dim, self.num_stages)

        @cute.struct
        class Storage:
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_q)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout_k)], 1024]

        blocks = tiles_q * q.shape[2] * sequences.shape[0]
        mma = tiled_mma(self.dtype, self.num_threads // 32, self.num_threads // 32)
        self.kernel(
            q,
            k,
            sink,
            softmax_lse,
            sequences,
            tiles_q,
            (inner_scale, outer_scale),
            (left, right, sink_tokens),
            has_sink,
            mma,
            Storage,
        ).launch(grid=[blocks, 1, 1], block=[self.num_threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        sink: cute.Tensor,
        softmax_lse: cute.Tensor,
        sequences: cute.Tensor,
        tiles_q: Int32,
        scales: tuple,
        window: tuple,
        has_sink: Int32,
        mma: cute.TiledMma,
        Storage: cutlass.Constexpr,
    ):
        """One CTA: grid (tiles_q * num_heads_q * batch_size), the tile changes fastest."""
        tid = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        m = block % tiles_q
        heads = Int32(q.shape[2])
        head = (block // tiles_q) % heads
        sequence = Sequence(sequences, block // tiles_q // heads)
        mask = Mask(sequence, window, self.tile_m, self.tile_n)
        if m * self.tile_m < sequence.seqlen_q:
            self.rows(q, k, sink, softmax_lse, sequence, mask, head, m, scales, has_sink, mma, Storage, tid)

    @cute.jit
    def rows(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        sink: cute.Tensor,
        softmax_lse: cute.Tensor,
        sequence,
        mask,
        head: Int32,
        m: Int32,
        scales,
        has_sink: Int32,
        mma: cute.TiledMma,
        Storage: cutlass.Constexpr,
        tid: Int32,
    ):
        """The statistics of one tile of queries: a running maximum and sum, in powers of two."""
        layout_q = tile_layout(self.tile_m, self.head_dim)
        layout_k = tile_layout(self.tile_n, self.head_dim, self.num_stages)
        storage = SmemAllocator().allocate(Storage)
        swizzle = tile_swizzle(self.head_dim)
        sQ, sK = storage.q.get_tensor(layout_q, swizzle=swizzle), storage.k.get_tensor(layout_k, swizzle=swizzle)
        scores = Product(mma, tid, self.dtype, sQ, sK, False, False)
        thread = mma.get_slice(tid)
        place = thread.partition_C(cute.make_identity_tensor((self.tile_m, self.tile_n)))
        head_kv = head // (q.shape[2] // k.shape[2])

        # tiles with sink tokens come first, then the window's
        end = end_n(mask, m)
        sinks = cutlass.min(sink_tiles(mask), end)
        first = cutlass.max(first_n(mask, m), sinks)
        total = sinks + cutlass.max(end - first, Int32(0))

        row = m * self.tile_m
        TileCopy(self.tile_m, self.head_dim, self.num_threads).load(
            Int32(storage.q.data_ptr().toint()),
            query_address(sequence, q, head, row),
            row_stride_bytes(q),
            (sequence.seqlen_q - row, q.shape[3]),
            tid,
        )
        if total > 0:
            self.load_keys(k, storage, sequence, head_kv, self.tile_of(Int32(0), sinks, first), Int32(0), tid)
        cute.arch.cp_async_commit_group()
        highest = cute.make_rmem_tensor(cute.make_layout(2), Float32)  # of rows r and r + 8 of the warp
        sums = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        highest.fill(-INFINITY)
        sums.fill(0.0)
        stage = Int32(0)
        for i in cutlass.range(total, unroll=1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if i + 1 < total:
                self.load_keys(k, storage, sequence, head_kv, self.tile_of(i + 1, sinks, first), 1 - stage, tid)
            cute.arch.cp_async_commit_group()
            n = self.tile_of(i, sinks, first)
            rS = cute.make_rmem_tensor(thread.partition_shape_C((self.tile_m, self.tile_n)), Float32)
            rS.fill(0.0)
            multiply(scores, rS, 0, stage)
            for j in cutlass.range_constexpr(cute.size(rS)):
                x = rS[j]
                if const_expr(self.softcap):
                    x = 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(x * scales[0], fastmath=True) + 1.0)
                rS[j] = x * scales[1]
            if not is_full(mask, m, n):
                for j in cutlass.range_constexpr(cute.size(rS)):
                    seen = sees(mask, m * self.tile_m + place[j][0], n * self.tile_n + place[j][1])
                    rS[j] = Float32(cutlass.select_(seen, rS[j], Float32(-INFINITY)))
            for half in cutlass.range_constexpr(2):
                mine = [j for j in range(cute.size(rS)) if j % 4 // 2 == half]
                top = highest[half]
                for j in mine:
                    top = cute.arch.fmax(top, rS[j])
                for distance in (1, 2):
                    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=distance))
                # a row that has seen nothing yet keeps a finite base
                base = Float32(cutlass.select_(top == Float32(-INFINITY), Float32(0.0), top))
                total_here = sums[half] * cute.math.exp2(highest[half] - base, fastmath=True)
                for j in mine:
                    total_here = total_here + cute.math.exp2(rS[j] - base, fastmath=True)
                sums[half] = total_here
                highest[half] = top
            stage = 1 - stage
        for half in cutlass.range_constexpr(2):
            total_row = sums[half]
            for distance in (1, 2):
                total_row = total_row + cute.arch.shuffle_sync_bfly(total_row, offset=distance)
            top = highest[half]
            if has_sink != 0:
                extra = sink[head] * Float32(LOG2_E)
                above = cute.arch.fmax(top, extra)
                base = Float32(cutlass.select_(above == Float32(-INFINITY), Float32(0.0), above))
                total_row = total_row * cute.math.exp2(top - base, fastmath=True) + cute.math.exp2(
                    extra - base, fastmath=True
                )
                top = above
            lse = (top + cute.math.log2(total_row, fastmath=True)) * Float32(LN_2)
            lse = Float32(cutlass.select_(total_row > 0.0, lse, Float32(-INFINITY)))
            i = row + tid // 32 * 16 + tid % 32 // 4 + half * 8
            if i < sequence.seqlen_q and tid % 4 == 0:
                cute.arch.store(statistic(softmax_lse, sequence, head, i), lse)
        cute.arch.cp_async_wait_group(0)

    def tile_of(self, i, sinks, first):
        """The i-th tile of keys that these rows see."""
        return Int32(cutlass.select_(i < sinks, i, first + i - sinks))

    @cute.jit
    def load_keys(self, k: cute.Tensor, storage, sequence, head: Int32, n: Int32, stage: Int32, tid: Int32):
        """Starts the copy of tile n of K into a stage."""
        row = n * self.tile_n
        TileCopy(self.tile_n, self.head_dim, self.num_threads).load(
            Int32(storage.k.data_ptr().toint()) + stage * (self.tile_n * self.head_dim * 2),
            key_address(sequence, k, head, row),
            row_stride_bytes(k),
            (sequence.seqlen_k - row, k.shape[3]),
            tid,
        )
