"""What the main loop needs of each query row: delta and lse_log2, padded to whole tiles, and a zeroed dq_accum.

delta = rowsum(dout * out) - dlse; lse_log2 = softmax_lse * log2(e). A row without keys (softmax_lse is -inf, or +inf)
and a row past the sequence get lse_log2 = +inf and delta = 0: P and dS are exactly zero there, whatever they read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dqkv_kernels.device.copy import VECTOR
from dqkv_kernels.device.seqlen import Sequence, padded_index, query_address, statistic

LOG2_E = 1.4426950408889634
INFINITY = float("inf")
ROW_LANES = 8
"""Threads that share one row."""


class Preprocess:
    """The kernel of one tile row. dtype: of out and dout."""

    def __init__(self, tile, dtype):
        self.tile, self.dtype = tile, dtype
        self.num_threads = 256

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        given_delta: cute.Tensor,
        softmax_lse: cute.Tensor,
        dlse: cute.Tensor,
        sink: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_accum: cute.Tensor,
        turns: cute.Tensor,
        dsink_parts: cute.Tensor,
        sequences: cute.Tensor,
        tiles_q: Int32,
        has_delta: Int32,
        has_dlse: Int32,
        has_sink: Int32,
        stream,
    ):
        """Launches a CTA for each of tiles_q tiles of queries, heads and sequences.

        out, dout (batches, rows, num_heads_q, head_dim_v); given_delta, softmax_lse, dlse (batches, num_heads_q, rows);
        sink (num_heads_q,) fp32. What a flag says is absent is never read, and any tensor may stand in for it. Writes
        lse_log2, delta (num_heads_q, padded rows), zeros to dq_accum (num_heads_q, padded rows * padded head_dim) and
        turns (num_heads_q, padded rows / tile_m), and each tile's part of dsink to dsink_parts, of the shape of turns.
        """
        blocks = tiles_q * lse_log2.shape[0] * sequences.shape[0]
        self.kernel(
            out,
            dout,
            given_delta,
            softmax_lse,
            dlse,
            sink,
            lse_log2,
            delta,
            dq_accum,
            turns,
            dsink_parts,
            sequences,
            tiles_q,
            has_delta,
            has_dlse,
            has_sink,
        ).launch(grid=[blocks, 1, 1], block=[self.num_threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        given_delta: cute.Tensor,
        softmax_lse: cute.Tensor,
        dlse: cute.Tensor,
        sink: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq_accum: cute.Tensor,
        turns: cute.Tensor,
        dsink_parts: cute.Tensor,
        sequences: cute.Tensor,
        tiles_q: Int32,
        has_delta: Int32,
        has_dlse: Int32,
        has_sink: Int32,
    ):
        """One CTA: grid (tiles_q * num_heads_q * batch_size), the tile changes fastest."""
        tile_m = self.tile.tile_m
        tid = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        m = block % tiles_q
        heads = Int32(lse_log2.shape[0])
        head = (block // tiles_q) % heads
        sequence = Sequence(sequences, block // tiles_q // heads)
        padded_rows = Int64(turns.shape[1]) * tile_m
        if m * tile_m < sequence.seqlen_q:
            shared = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(tile_m), 16)
            # in turns and dsink_parts
            tile_index = Int64(head) * Int64(turns.shape[1]) + sequence.padded_row // tile_m + Int64(m)
            lane, slot = tid % ROW_LANES, tid // ROW_LANES
            rows_a_pass = self.num_threads // ROW_LANES
            sink_part = Float32(0.0)
            for p in cutlass.range_constexpr((tile_m + rows_a_pass - 1) // rows_a_pass):
                row = slot + p * rows_a_pass
                i = m * tile_m + row
                exists = (row < tile_m) & (i < sequence.seqlen_q)
                # all lanes take part in the sum over a row: a row that does not exist reads the last one that does
                place = cutlass.min(i, sequence.seqlen_q - 1)
                lse = cute.arch.load(statistic(softmax_lse, sequence, head, place), Float32)
                total = Float32(0.0)
                if has_delta != 0:
                    total = cute.arch.load(statistic(given_delta, sequence, head, place), Float32)
                else:
                    total = self.row_dot(out, dout, sequence, head, place, lane)
                if has_dlse != 0:
                    total = total - cute.arch.load(statistic(dlse, sequence, head, place), Float32)
                alive = exists & (lse != Float32(-INFINITY)) & (lse != Float32(INFINITY))
                total = Float32(cutlass.select_(alive, total, Float32(0.0)))
                if row < tile_m and lane == 0:
                    target = padded_index(sequence, padded_rows, head, i)
                    cute.arch.store(delta.iterator + target, total)
                    scaled = Float32(cutlass.select_(alive, lse * Float32(LOG2_E), Float32(INFINITY)))
                    cute.arch.store(lse_log2.iterator + target, scaled)
                    if has_sink != 0:
                        # the sink's share of the row's softmax; it has no value, so its dP is 0
                        weight = cute.math.exp2(sink[head] * Float32(LOG2_E) - scaled, fastmath=True)
                        shared[row] = Float32(cutlass.select_(alive, -weight * total, Float32(0.0)))
            accumulator = dq_accum.iterator.toint() + padded_index(sequence, padded_rows, head, m * tile_m) * (
                self.tile.head_dim * 4
            )
            for step in cutlass.range_constexpr(tile_m * self.tile.head_dim // 4 // self.num_threads):
                cute.arch.inline_ptx(
                    "st.global.v4.f32 [{$r0}], { {$r1}, {$r1}, {$r1}, {$r1} };",
                    read_only_args=[accumulator + Int64((step * self.num_threads + tid) * 16), Float32(0.0)],
                )
            if has_sink != 0:
                cute.arch.sync_threads()
                if tid == 0:
                    # in order of the rows, so that dsink does not change from run to run
                    for row in cutlass.range(tile_m, unroll=4):
                        sink_part = sink_part + shared[row]
                    cute.arch.store(dsink_parts.iterator + tile_index, sink_part)
            if tid == 0:
                cute.arch.store(turns.iterator + tile_index, Int32(0))

    @cute.jit
    def row_dot(self, out: cute.Tensor, dout: cute.Tensor, sequence, head: Int32, i: Int32, lane: Int32) -> Float32:
        """rowsum(out * dout) of row i in fp32, the same in all lanes of the row."""
        a, b = query_address(sequence, out, head, i), query_address(sequence, dout, head, i)
        total = Float32(0.0)
        steps = (self.tile.head_dim_v + ROW_LANES * VECTOR - 1) // (ROW_LANES * VECTOR)
        for s in cutlass.range_constexpr(steps):
            column = (lane + s * ROW_LANES) * VECTOR
            if column < dout.shape[3]:
                left, right = self.vector(a + Int64(column * 2)), self.vector(b + Int64(column * 2))
                for j in cutlass.range_constexpr(VECTOR):
                    total = total + Float32(left[j]) * Float32(right[j])
        for distance in (1, 2, 4):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
        return total

    def vector(self, address):
        """Eight elements from a 16-byte aligned Int64 address, in registers."""
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        registers = cute.make_rmem_tensor(cute.make_layout(VECTOR), self.dtype)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(VECTOR)), registers)
        return registers
