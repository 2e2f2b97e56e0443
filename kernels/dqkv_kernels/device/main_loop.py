"""What every main loop shares: its launch, its shared memory, and how tiles come in and gradients go out.

A CTA owns tile_n keys of a key head and walks the queries of all heads that share it. With S = Q K^T,
P = exp2(scaled S - lse_log2), dP = dO V^T and dS = P (dP - delta), a step adds P^T dO to dV and dS^T Q to dK, which
stay in registers until the end, and dS K to dq_accum, in fp32 atomics. How the products are taken is the subclass's.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from dqkv_kernels.device import accumulator
from dqkv_kernels.device.copy import TileCopy, tile_layout, tile_swizzle
from dqkv_kernels.device.mask import Mask, tiles_after
from dqkv_kernels.device.seqlen import Sequence, key_address, padded_index, query_address, row_stride_bytes


class MainLoop:
    """The kernel of one tile row. dtype: of q, k, v, dout; grad_dtype: of dk, dv; softcap: whether there is one.

    A subclass has `sizes`, `tiled_mmas` and `walk`.
    """

    def __init__(self, tile, dtype, grad_dtype, softcap):
        self.tile, self.dtype, self.grad_dtype, self.softcap = tile, dtype, grad_dtype, softcap
        self.num_threads = tile.num_threads

    def operand(self, memory, name):
        """The tensor (rows, columns, stage) of one operand in its part of shared memory."""
        rows, width, stages = self.sizes(name)
        return memory.get_tensor(tile_layout(rows, width, stages), swizzle=tile_swizzle(width))

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
        size_q, size_dout, size_k, size_v, size_p, size_ds = (
            math.prod(self.sizes(name)) for name in ("q", "dout", "k", "v", "p", "ds")
        )
        size_lse_log2, size_delta = (self.tile.tile_m * self.sizes(name)[2] for name in ("q", "dout"))

        @cute.struct
        class Storage:
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, size_k], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, size_v], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, size_q], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[self.dtype, size_dout], 1024]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, size_p], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[self.dtype, size_ds], 1024]
            lse_log2: cute.struct.Align[cute.struct.MemRange[Float32, size_lse_log2], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, size_delta], 128]

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
            self.tiled_mmas(),
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
        if deterministic != 0:
            # the last tile adds first: under a causal mask it is the first to reach any tile of queries that it sees
            n = tiles_k - 1 - n
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
    def load_keys(self, k: cute.Tensor, v: cute.Tensor, storage, sequence, head, n: Int32, tid: Int32):
        """Starts the copies of tile n of K and V."""
        row = n * self.tile.tile_n
        rows = sequence.seqlen_k - row
        operands = (("k", k, storage.k), ("v", v, storage.v))
        for name, tensor, memory in operands:
            TileCopy(self.tile.tile_n, self.sizes(name)[1], self.num_threads).load(
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
        stages: tuple,
        tid: Int32,
    ):
        """Starts the copies of tile m of Q and lse_log2, and of dO and delta, into their stages."""
        tile_m = self.tile.tile_m
        row = m * tile_m
        rows = sequence.seqlen_q - row
        operands = (
            (q, storage.q, self.tile.head_dim, stages[0]),
            (dout, storage.dout, self.tile.head_dim_v, stages[1]),
        )
        for tensor, memory, width, stage in operands:
            TileCopy(tile_m, width, self.num_threads).load(
                Int32(memory.data_ptr().toint()) + stage * (tile_m * width * 2),
                query_address(sequence, tensor, head, row),
                row_stride_bytes(tensor),
                (rows, tensor.shape[3]),
                tid,
            )
        # both statistics are padded to whole tiles, so nothing is tested; one thread moves four rows
        index = padded_index(sequence, Int64(lse_log2.shape[1]), head, row)
        statistics = ((lse_log2, storage.lse_log2, stages[0]), (delta, storage.delta, stages[1]))
        for place, (tensor, memory, stage) in enumerate(statistics):
            lane = tid - place * (tile_m // 4)
            target = Int32(memory.data_ptr().toint()) + stage * (tile_m * 4) + lane * 16
            cute.arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                read_only_args=[target, tensor.iterator.toint() + index * 4 + Int64(lane * 16)],
                predicate=(lane >= 0) & (lane < tile_m // 4),
            )

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
        """Adds a tile to dq_accum; when deterministic, after all higher key tiles have added theirs."""
        turn = self.turn_of(turns, sequence, head, m)
        self.await_turn(turn, mask, m, n, deterministic, tid)
        block = self.dq_block(dq_accum, turns, sequence, head, m)
        accumulator.add(block, rdQ, tid, self.num_threads, self.tile.red_width)
        self.pass_turn(turn, deterministic, tid)

    def dq_block(self, dq_accum, turns, sequence, head, m):
        """Int64 byte address of the block of dq_accum that tile m of a head owns."""
        padded_rows = Int64(turns.shape[1]) * self.tile.tile_m
        index = padded_index(sequence, padded_rows, head, m * self.tile.tile_m)
        return dq_accum.iterator.toint() + index * (self.tile.head_dim * 4)

    def turn_of(self, turns, sequence, head, m):
        """Pointer to the count of key tiles that have added to tile m of a head."""
        return turns.iterator + (
            Int64(head) * Int64(turns.shape[1]) + sequence.padded_row // self.tile.tile_m + Int64(m)
        )

    @cute.jit
    def await_turn(self, turn: cute.Pointer, mask, m: Int32, n: Int32, deterministic: Int32, tid: Int32):
        """When deterministic, waits until all higher key tiles have added theirs."""
        if deterministic != 0:
            if tid == 0:
                # a CTA waits only for CTAs of lower index, and those are started first
                before = tiles_after(mask, m, n)
                done = Int32(0)
                while done < before:
                    done = cute.arch.load(turn, Int32, sem="acquire", scope="gpu")
            cute.arch.sync_threads()

    @cute.jit
    def pass_turn(self, turn: cute.Pointer, deterministic: Int32, tid: Int32):
        """When deterministic, lets the next key tile add."""
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
        name: cutlass.Constexpr,
        memory,
        gradient: cute.Tensor,
        sequence,
        head: Int32,
        n: Int32,
        tid: Int32,
    ):
        """A tile of dK or dV to global memory: through the memory of operand `name` in 16 bits, directly in fp32."""
        tile_n = self.tile.tile_n
        row = n * tile_n
        rows = sequence.seqlen_k - row
        address = key_address(sequence, gradient, head, row)
        pitch = row_stride_bytes(gradient)
        width = self.sizes(name)[1]
        if const_expr(self.grad_dtype is Float32):
            place = mma.get_slice(tid).partition_C(cute.make_identity_tensor((tile_n, width)))
            write_pairs(fragment, place, address, pitch, (rows, gradient.shape[3]))
        else:
            self.put(fragment, mma, self.operand(memory, name), tid)
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
