"""dq_accum to dq: fp32 sums in the main loop's register order become rows, scaled and rounded."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from dqkv_kernels.device import accumulator
from dqkv_kernels.device.copy import TileCopy, tile_layout, tile_swizzle
from dqkv_kernels.device.seqlen import Sequence, padded_index, query_address, row_stride_bytes
from dqkv_kernels.device.main_loop import write_pairs
from dqkv_kernels.device.sm80.main_loop import tiled_mma


LANES_THREADS = 256
"""Threads of a CTA where the accumulator comes from tensor memory: its order leaves their number open."""


class Postprocess:
    """The kernel of one tile row. grad_dtype: of dq."""

    def __init__(self, tile, grad_dtype):
        self.tile, self.grad_dtype = tile, grad_dtype
        self.of_lanes = tile.dq_split == "lanes"
        self.num_threads = LANES_THREADS if self.of_lanes else tile.num_threads

    @cute.jit
    def __call__(
        self,
        dq_accum: cute.Tensor,
        dq: cute.Tensor,
        sequences: cute.Tensor,
        tiles_q: Int32,
        padded_rows: Int64,
        scale: Float32,
        stream,
    ):
        """Launches a CTA for each of tiles_q tiles of queries, heads and sequences.

        dq_accum (num_heads_q, padded_rows * padded head_dim) fp32; dq (batches, rows, num_heads_q, head_dim).
        """
        blocks = tiles_q * dq.shape[2] * sequences.shape[0]
        # only the layout of its result matters, which is the same for both input dtypes, and for wgmma too
        warps = self.num_threads // 32 // self.tile.dq_parts
        mma = tiled_mma(cutlass.BFloat16, warps, self.tile.warps_m_q)
        self.kernel(dq_accum, dq, sequences, tiles_q, padded_rows, scale, mma).launch(
            grid=[blocks, 1, 1], block=[self.num_threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        dq_accum: cute.Tensor,
        dq: cute.Tensor,
        sequences: cute.Tensor,
        tiles_q: Int32,
        padded_rows: Int64,
        scale: Float32,
        mma: cute.TiledMma,
    ):
        """One CTA: grid (tiles_q * num_heads_q * batch_size), the tile changes fastest."""
        tid = cute.arch.thread_idx()[0]
        block = cute.arch.block_idx()[0]
        m = block % tiles_q
        heads = Int32(dq.shape[2])
        head = (block // tiles_q) % heads
        sequence = Sequence(sequences, block // tiles_q // heads)
        if m * self.tile.tile_m < sequence.seqlen_q:
            if const_expr(self.of_lanes):
                self.convert_lanes(dq_accum, dq, sequence, head, m, padded_rows, scale, tid)
            else:
                self.convert(dq_accum, dq, sequence, head, m, padded_rows, scale, mma, tid)

    @cute.jit
    def convert(
        self,
        dq_accum: cute.Tensor,
        dq: cute.Tensor,
        sequence,
        head: Int32,
        m: Int32,
        padded_rows,
        scale: Float32,
        mma: cute.TiledMma,
        tid: Int32,
    ):
        """One tile: registers in the main loop's order, then rows."""
        tile_m, width = self.tile.tile_m, self.tile.head_dim
        # one warpgroup's part of the tile, or all of it
        threads = self.num_threads // self.tile.dq_parts
        part, lane = tid // threads, tid % threads
        part_m = tile_m // self.tile.dq_parts if const_expr(self.tile.dq_split == "rows") else tile_m
        part_width = width // self.tile.dq_parts if const_expr(self.tile.dq_split == "columns") else width
        where = (part, 0) if const_expr(self.tile.dq_split == "rows") else (0, part)
        thread = mma.get_slice(lane)
        rdQ = cute.make_rmem_tensor(thread.partition_shape_C((part_m, part_width)), Float32)
        source = dq_accum.iterator.toint() + padded_index(sequence, padded_rows, head, m * tile_m) * (width * 4)
        accumulator.read(source, rdQ, tid, self.num_threads, self.tile.red_width)
        for j in cutlass.range_constexpr(cute.size(rdQ)):
            rdQ[j] = rdQ[j] * scale
        row = m * tile_m
        limits = (sequence.seqlen_q - row, dq.shape[3])
        address = query_address(sequence, dq, head, row)
        if const_expr(self.grad_dtype is Float32):
            whole = cute.make_identity_tensor((tile_m, width))
            place = thread.partition_C(cute.local_tile(whole, (part_m, part_width), where))
            write_pairs(rdQ, place, address, row_stride_bytes(dq), limits)
        else:
            shared = SmemAllocator().allocate_tensor(
                self.grad_dtype, tile_layout(tile_m, width), 1024, swizzle=tile_swizzle(width)
            )
            rounded = cute.make_rmem_tensor_like(rdQ, self.grad_dtype)
            rounded.store(rdQ.load().to(self.grad_dtype))
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.grad_dtype, num_bits_per_copy=32)
            store = cute.make_tiled_copy_C(atom, mma)
            to = store.get_slice(lane)
            mine = cute.local_tile(shared[None, None, 0], (part_m, part_width), where)
            cute.copy(store, to.retile(rounded), to.partition_D(mine))
            cute.arch.sync_threads()
            TileCopy(tile_m, width, self.num_threads).store(
                Int32(shared.iterator.toint()), address, row_stride_bytes(dq), limits, tid
            )

    @cute.jit
    def convert_lanes(
        self,
        dq_accum: cute.Tensor,
        dq: cute.Tensor,
        sequence,
        head: Int32,
        m: Int32,
        padded_rows,
        scale: Float32,
        tid: Int32,
    ):
        """One tile whose accumulator has a row in each lane: a thread takes four columns of a row at a time."""
        tile_m, width = self.tile.tile_m, self.tile.head_dim
        row = m * tile_m
        limits = (sequence.seqlen_q - row, dq.shape[3])
        address, pitch = query_address(sequence, dq, head, row), row_stride_bytes(dq)
        source = dq_accum.iterator.toint() + padded_index(sequence, padded_rows, head, row) * (width * 4)
        element_bytes = self.grad_dtype.width // 8
        for step in cutlass.range_constexpr(tile_m // (self.num_threads // 32 * accumulator.LANE_ROWS)):
            for chunk in cutlass.range_constexpr(width // accumulator.CHUNK):
                here, column = accumulator.lanes_place(tid, step, chunk, self.num_threads)
                values = accumulator.read_lanes(source, here, column, tile_m)
                rounded = cute.make_rmem_tensor(cute.make_layout(4), self.grad_dtype)
                for j in cutlass.range_constexpr(4):
                    rounded[j] = (values[j] * scale).to(self.grad_dtype)
                words = cute.recast_tensor(rounded, Int32)
                exists = (here < limits[0]) & (column < limits[1])
                target = address + Int64(here) * pitch + Int64(column * element_bytes)
                if const_expr(self.grad_dtype is Float32):
                    cute.arch.inline_ptx(
                        "st.global.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
                        read_only_args=[target, words[0], words[1], words[2], words[3]],
                        predicate=exists,
                    )
                else:
                    cute.arch.inline_ptx(
                        "st.global.v2.b32 [{$r0}], { {$r1}, {$r2} };",
                        read_only_args=[target, words[0], words[1]],
                        predicate=exists,
                    )
