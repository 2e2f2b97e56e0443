"""The load warp: tiles of K, V, Q and dO by tensor copies, statistics by bulk copies, each on its mbarrier.

A tensor copy knows the bounds of a tensor, not of a sequence. What it reads past a sequence's end may be NaN, and is
overwritten with zeros before the tile is called full.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from dqkv_kernels.device.seqlen import padded_index
from dqkv_kernels.device.sm100 import barrier
from dqkv_kernels.device.sm100.operand import BLOCK_COLUMNS, BLOCK_ROW_BYTES
from dqkv_kernels.device.sm100.program import Act, Role, Wait

WARP = 32
VECTOR_BYTES = 16


class Loads:
    """The load role of a main loop that has `program` and `dtype`."""

    @cute.jit
    def load(
        self,
        sources: tuple,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        sequence,
        walk,
        place,
        shared: Int32,
        barriers,
    ):
        """All loads of a CTA, in order."""
        program = self.program
        first_head, m_first, tiles_m, total = walk
        head_kv, n = place
        from_k, from_v, from_q, from_dout = sources
        row = n * program.tile_n
        rows = sequence.seqlen_k - row
        at = (Int32(sequence.row_k) + row, head_kv, Int32(sequence.batch_k))
        # how many loads took the way over this warp's own barrier
        landings = Int32(0)
        target = begin(program, barriers, "kv_full", Int32(0), rows < program.tile_n)
        self.copy_tile("k", from_k, at, Int32(0), shared, target)
        self.copy_tile("v", from_v, at, Int32(0), shared, target)
        if rows < program.tile_n:
            barrier.await_phase(target, landings & 1)
            clear(program, "k", rows, Int32(0), shared)
            clear(program, "v", rows, Int32(0), shared)
            finish(program, barriers, "kv_full", Int32(0))
            landings = landings + 1
        head, m = first_head, m_first
        for i in cutlass.range(total, unroll=1):
            row = m * program.tile_m
            rows = sequence.seqlen_q - row
            at = (Int32(sequence.row_q) + row, head, Int32(sequence.batch_q))
            for step in program.each[Role.LOAD]:
                use = i + step.at
                if const_expr(isinstance(step, Wait)):
                    barrier.wait(program, barriers, step.barrier, use)
                elif const_expr(isinstance(step, Act) and step.name == "load_q"):
                    target = begin(program, barriers, "q_full", use, rows < program.tile_m)
                    self.copy_tile("q", from_q, at, use, shared, target)
                    index = padded_index(sequence, Int64(lse_log2.shape[1]), head, row)
                    copy_statistic(program, "lse_log2", lse_log2, index, use, shared, target)
                    copy_statistic(program, "delta", delta, index, use, shared, target)
                    if rows < program.tile_m:
                        barrier.await_phase(target, landings & 1)
                        clear(program, "q", rows, use, shared)
                        finish(program, barriers, "q_full", use)
                        landings = landings + 1
                elif const_expr(isinstance(step, Act)):
                    target = begin(program, barriers, "dout_full", use, rows < program.tile_m)
                    self.copy_tile("dout", from_dout, at, use, shared, target)
                    if rows < program.tile_m:
                        barrier.await_phase(target, landings & 1)
                        clear(program, "dout", rows, use, shared)
                        finish(program, barriers, "dout_full", use)
                        landings = landings + 1
            last_m = m + 1 == m_first + tiles_m
            head = head + Int32(last_m)
            m = Int32(cutlass.select_(last_m, m_first, m + 1))

    @cute.jit
    def copy_tile(self, name: cutlass.Constexpr, source, at, use: Int32, shared: Int32, target: Int32):
        """Starts the tensor copies of a tile, one a block of 64 columns. at: (row, head, batch) of its first row."""
        operand = self.program.operand(name)
        atom, coordinates = source
        row, head, batch = at
        first = begin_of(self.program, name, use, shared)
        moved = cute.domain_offset((row, 0), coordinates[None, None, head, batch])  # (rows, width) from this tile on
        for block in cutlass.range_constexpr(operand.columns // BLOCK_COLUMNS):
            from_tile = cute.local_tile(moved, (operand.rows, BLOCK_COLUMNS), (0, block))
            pointer = cute.make_ptr(
                self.dtype, first + block * operand.block_bytes, cute.AddressSpace.smem, assumed_align=1024
            )
            layout = block_layout(operand)
            to_tile = cute.make_tensor(cute.recast_ptr(pointer, swizzle_=layout.inner), layout.outer)
            to_part, from_part = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(to_tile, 0, 2), cute.group_modes(from_tile, 0, 2)
            )
            mbarrier = cute.make_ptr(Int64, target, cute.AddressSpace.smem, assumed_align=8)
            cute.copy(atom, from_part, to_part, tma_bar_ptr=mbarrier)


def source(tensor, operand):
    """(copy atom, coordinates (rows, width, heads, batches)) of one block of an operand in a 4-d tensor."""
    batches, rows, heads, width = tensor.shape
    strides = tensor.stride
    # no map of no rows can be made; nothing is loaded from such a tensor
    shape = tuple(cutlass.max(Int32(size), Int32(1)) for size in (rows, width, heads, batches))
    view = cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=(strides[1], 1, strides[2], strides[0])))
    made = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), view, block_layout(operand), (operand.rows, BLOCK_COLUMNS)
    )
    return made[0], made[1]


def block_layout(operand):
    """One block of an operand in shared memory: 64 columns, the 16-byte vectors of 8 rows permuted."""
    layout = cute.make_layout((operand.rows, BLOCK_COLUMNS), stride=(BLOCK_COLUMNS, 1))
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, layout)


@cute.jit
def begin(program: cutlass.Constexpr, barriers: Int32, name: cutlass.Constexpr, use: Int32, is_partial) -> Int32:
    """Announces a load's bytes; Int32 address of the mbarrier they arrive on.

    That is the ring's own, or "landing", which only this warp waits for, where rows are to be cleared first.
    """
    target = Int32(
        cutlass.select_(
            is_partial,
            barrier.address(program, barriers, "landing", Int32(0)),
            barrier.address(program, barriers, name, use),
        )
    )
    with cute.arch.elect_one():
        barrier.expect(target, program.transaction_bytes(name))
    return target


@cute.jit
def finish(program: cutlass.Constexpr, barriers: Int32, name: cutlass.Constexpr, use: Int32):
    """Completes a use whose bytes arrived on "landing", after what all threads have cleared."""
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        barrier.arrive(barrier.address(program, barriers, name, use))


def begin_of(program, name, use, shared):
    """Int32 shared address of the copy of an operand that a use takes."""
    operand = program.operand(name)
    return shared + program.shared[name] + (use & (operand.stages - 1)) * operand.stage_bytes


@cute.jit
def copy_statistic(
    program: cutlass.Constexpr,
    name: cutlass.Constexpr,
    tensor: cute.Tensor,
    index: Int64,
    use: Int32,
    shared: Int32,
    target: Int32,
):
    """Starts the copy of a tile's rows of lse_log2 or delta, which are padded to whole tiles. index: of the first."""
    nbytes = program.loaded_bytes(name)
    stages = program.operand("q").stages
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                shared + program.shared[name] + (use & (stages - 1)) * nbytes,
                tensor.iterator.toint() + index * 4,
                Int32(nbytes),
                target,
            ],
        )


@cute.jit
def clear(program: cutlass.Constexpr, name: cutlass.Constexpr, rows: Int32, use: Int32, shared: Int32):
    """Zeros to an operand's rows from `rows` on, a row of a block at a time, by all threads of the warp."""
    operand = program.operand(name)
    first = begin_of(program, name, use, shared)
    vectors = BLOCK_ROW_BYTES // VECTOR_BYTES
    lane = cute.arch.lane_idx()
    for row in cutlass.range(rows + lane // vectors, operand.rows, WARP // vectors, unroll=1):
        for block in cutlass.range_constexpr(operand.columns // BLOCK_COLUMNS):
            cute.arch.inline_ptx(
                "st.shared.v4.b32 [{$r0}], { {$r1}, {$r1}, {$r1}, {$r1} };",
                read_only_args=[
                    first + block * operand.block_bytes + row * BLOCK_ROW_BYTES + lane % vectors * VECTOR_BYTES,
                    Int32(0),
                ],
            )
