"""The main loop of arch 100 as data: memory maps, products, barriers, and what each warp role does in one step.

Device code and the host model both run these tables. No compiler is needed to read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from dqkv_kernels.device.sm100.operand import DEPTH, ROWS, Operand, Product

TENSOR_MEMORY_COLUMNS = 512
"""Columns of 128 lanes x 32 bits that one CTA may have."""
DRAIN_COLUMNS = 32
"""Columns of dQ that leave tensor memory together, as one bulk reduce-add."""


class Role(StrEnum):
    """The parts of a CTA that run on their own; their numbers of warps are in WARPS."""

    SOFTMAX = "softmax"
    REDUCE = "reduce"
    MULTIPLY = "multiply"
    LOAD = "load"


WARPS = {Role.SOFTMAX: 8, Role.REDUCE: 4, Role.MULTIPLY: 1, Role.LOAD: 1}
"""Softmax and reduce start at multiples of four warps: warp w reaches the 32 lanes from 32 * (w % 4) on only."""
NUM_THREADS = 512
"""Registers are given to four warps at a time, so two warps beside multiply and load have nothing to do."""
REGISTERS = {Role.SOFTMAX: 152, Role.REDUCE: 88, Role.MULTIPLY: 120, Role.LOAD: 120}
"""A thread, of 65,536 in all: softmax keeps half a row of P and works on 32 columns of S or dP."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Columns of tensor memory under one name. parts: (first column, columns) of each part, in order."""

    name: str
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """A ring of mbarriers. Its use u is mbarrier u % stages, and phase u // stages of it.

    arrivals: that complete a phase, besides the bytes of what `loads` names (rings of operands; None: no bytes).
    """

    name: str
    arrivals: int = 1
    stages: int = 1
    loads: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Until use i + at of a barrier is complete; nothing where there is no such step."""

    barrier: str
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Use i + at of a barrier: of all products so far (multiply), of the bytes (load), of a warp's work (others)."""

    barrier: str
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class Act:
    """What a role does: takes the products of a name (multiply), or the one of its functions that is called so."""

    name: str
    at: int = 0


Step = Wait | Signal | Act


@dataclass(frozen=True, kw_only=True)
class Program:
    """One tile row's main loop. lanes: what the 128 lanes of S and dP are, "keys" (S transposed) or "queries".

    A CTA takes the steps i = 0 .. total - 1, a tile of queries of a head each. first: before all of them. each: for
    i = -1 .. total - 1, leaving out what would concern a step that is not there. last: after all, with i = total - 1.
    shared: (operand or buffer name, byte offset) of each in shared memory. stages_dq: buffers of DRAIN_COLUMNS columns
    that dQ passes through.
    """

    lanes: str
    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    operands: tuple[Operand, ...]
    slots: tuple[Slot, ...]
    products: tuple[Product, ...]
    barriers: tuple[Barrier, ...]
    first: dict[Role, tuple[Step, ...]]
    each: dict[Role, tuple[Step, ...]]
    last: dict[Role, tuple[Step, ...]]
    shared: dict[str, int]
    stages_dq: int

    def operand(self, name: str) -> Operand:
        """The operand of a name. Raises KeyError."""
        return {operand.name: operand for operand in self.operands}[name]

    def slot(self, name: str) -> Slot:
        """The slot of a name. Raises KeyError."""
        return {slot.name: slot for slot in self.slots}[name]

    def barrier(self, name: str) -> Barrier:
        """The barrier of a name. Raises KeyError."""
        return {barrier.name: barrier for barrier in self.barriers}[name]

    def barrier_index(self, name: str) -> int:
        """Where the ring of a barrier begins among all mbarriers. Raises KeyError."""
        index = 0
        for barrier in self.barriers:
            if barrier.name == name:
                return index
            index += barrier.stages
        raise KeyError(name)

    def products_of(self, act: str) -> tuple[Product, ...]:
        """The products that an act of the multiply role takes, in order."""
        return tuple(product for product in self.products if product.act == act)

    def transaction_bytes(self, barrier: str) -> int:
        """Bytes that arrive on one use of a barrier."""
        return sum(self.loaded_bytes(name) for name in self.barrier(barrier).loads)

    def loaded_bytes(self, name: str) -> int:
        """Bytes of one stage of what is loaded under a name: an operand, or a statistic of each query."""
        return self.tile_m * 4 if name in STATISTICS else self.operand(name).stage_bytes

    @property
    def dq_stage_bytes(self) -> int:
        """Bytes of DRAIN_COLUMNS columns of dQ, in fp32."""
        return self.tile_m * DRAIN_COLUMNS * 4

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes of shared memory: where the last part ends."""
        return max(offset + self.shared_part_bytes(name) for name, offset in self.shared.items())

    def shared_part_bytes(self, name: str) -> int:
        """Bytes of a named part of shared memory, all stages."""
        if name == "dq":
            return self.stages_dq * self.dq_stage_bytes
        if name == "barriers":
            return 8 * sum(barrier.stages for barrier in self.barriers)
        if name == "tensor_memory":
            return 4
        if name in STATISTICS:
            return self.operand("q").stages * self.tile_m * 4
        return self.operand(name).stages * self.operand(name).stage_bytes

    def copies_running(self, stage: int) -> int:
        """How many bulk copies may still read when the stage-th columns of dQ are written to their buffer.

        The first stage waits for all: where columns are padding fewer stages leave than there are, so that the last
        copy of the step before may be of any buffer.
        """
        return self.stages_dq - 1 if stage else 0

    def dq_column(self, stage: int) -> int:
        """The first tensor-memory column of the stage-th DRAIN_COLUMNS columns of dQ."""
        column = stage * DRAIN_COLUMNS
        for first, columns in self.slot("dq").parts:
            if column < columns:
                return first + column
            column -= columns
        raise KeyError(stage)


STATISTICS = ("lse_log2", "delta")
"""fp32, one a query; they come and go with Q, since dO leaves before delta is read."""


def dq_index(row: int, column: int, tile_m: int) -> int:
    """Where element (row, column) of a tile of dQ lies in its block of dq_accum, in floats.

    Four columns of a row are one 16-byte vector, so that the 32 rows of a warp are stored without bank conflicts, and
    each DRAIN_COLUMNS columns are one dense run that a bulk reduce-add takes.
    """
    return column // 4 * 4 * tile_m + row * 4 + column % 4


def dq_place(index: int, tile_m: int) -> tuple[int, int]:
    """(row, column) of the float at an index of a block of dq_accum: the inverse of `dq_index`."""
    vectors, rest = divmod(index, 4 * tile_m)
    return rest // 4, vectors * 4 + rest % 4


def _shared(parts: list[tuple[str, int]], alias: dict[str, str]) -> dict[str, int]:
    """Offsets of (name, bytes) parts one after the other; alias: name of a part -> of the one whose memory it takes."""
    offsets, end = {}, 0
    for name, nbytes in parts:
        if name in alias:
            offsets[name] = offsets[alias[name]]
            continue
        # what is swizzled has to lie on a multiple of eight 128-byte rows
        end = -(-end // 1024) * 1024 if nbytes >= 1024 else -(-end // 16) * 16
        offsets[name] = end
        end += nbytes
    return offsets


def _laid_out(program: Program, alias: dict[str, str]) -> Program:
    names = [operand.name for operand in program.operands if operand.in_shared_memory]
    names += ["dq", *STATISTICS, "barriers", "tensor_memory"]
    return replace(program, shared=_shared([(name, program.shared_part_bytes(name)) for name in names], alias))


def _barriers(stages_q: int, stages_dout: int, names: dict[str, int]) -> tuple[Barrier, ...]:
    loads = (
        Barrier(name="kv_full", loads=("k", "v")),
        Barrier(name="q_full", stages=stages_q, loads=("q", *STATISTICS)),
        Barrier(name="dout_full", stages=stages_dout, loads=("dout",)),
        Barrier(name="q_empty", stages=stages_q),
        Barrier(name="dout_empty", stages=stages_dout),
        # of a tile that ends past its sequence: its bytes arrive here, and rows are cleared before it is called full
        Barrier(name="landing"),
    )
    return loads + tuple(Barrier(name=name, arrivals=arrivals) for name, arrivals in names.items())


def _load_q(stages: int) -> tuple[Step, ...]:
    return Wait(barrier="q_empty", at=-stages), Act(name="load_q"), Signal(barrier="q_full")


def _load_dout(stages: int) -> tuple[Step, ...]:
    return Wait(barrier="dout_empty", at=-stages), Act(name="load_dout"), Signal(barrier="dout_full")


_FIRST: dict[Role, tuple[Step, ...]] = {
    Role.LOAD: (Act(name="load_kv"), Signal(barrier="kv_full")),
    Role.MULTIPLY: (Wait(barrier="kv_full"),),
}


def narrow(head_dim: int, head_dim_v: int, stages_q: int, stages_dout: int) -> Program:
    """Heads up to 128 wide: 128 keys and 128 queries a step, S and dP transposed, P^T a left operand as it lies.

    S of step i + 1 is taken while dS of step i is made. Where the columns do not suffice dQ lies over dP, and P always
    over S, each half of the softmax warps' P over the columns that the same warps have read.
    """
    m = n = 128
    dv, dk = 128, 384
    dq = 256 if head_dim > 64 else 448
    operands = (
        Operand(name="k", rows=n, columns=head_dim),
        Operand(name="v", rows=n, columns=head_dim_v),
        Operand(name="q", rows=m, columns=head_dim, stages=stages_q),
        Operand(name="dout", rows=m, columns=head_dim_v, stages=stages_dout),
        Operand(name="p", rows=n, columns=m, in_shared_memory=False),
        Operand(name="ds", rows=n, columns=m),
    )
    slots = (
        Slot(name="s", parts=((0, m),)),
        Slot(name="p", parts=((0, m // 4), (m // 2, m // 4))),
        Slot(name="dv", parts=((dv, head_dim_v),)),
        Slot(name="dp", parts=((256, m),)),
        Slot(name="dq", parts=((dq, head_dim),)),
        Slot(name="dk", parts=((dk, head_dim),)),
    )
    products = (
        Product(act="s", a="k", a_major=DEPTH, b="q", b_major=DEPTH, d="s", n=m, depth=head_dim),
        Product(act="dp", a="v", a_major=DEPTH, b="dout", b_major=DEPTH, d="dp", n=m, depth=head_dim_v),
        Product(act="dv", a="p", a_major=DEPTH, b="dout", b_major=ROWS, d="dv", n=head_dim_v, depth=m, sums=True),
        Product(act="dk", a="ds", a_major=DEPTH, b="q", b_major=ROWS, d="dk", n=head_dim, depth=m, sums=True),
        Product(act="dq", a="ds", a_major=ROWS, b="k", b_major=ROWS, d="dq", n=head_dim, depth=n),
    )
    softmax, reduce = WARPS[Role.SOFTMAX], WARPS[Role.REDUCE]
    ones = {"s_full": 1, "p_full": softmax, "dp_full": 1, "ds_full": softmax, "dv_full": 1, "dq_full": 1}
    each: dict[Role, tuple[Step, ...]] = {
        Role.LOAD: (*_load_q(stages_q), *_load_dout(stages_dout)),
        Role.MULTIPLY: (
            Wait(barrier="dout_full"),
            Wait(barrier="dq_empty", at=-1),  # dP takes dQ's columns
            Act(name="dp"),
            Signal(barrier="dp_full"),
            Wait(barrier="p_full"),
            Act(name="dv"),
            Signal(barrier="dout_empty"),
            Signal(barrier="dv_full"),
            Wait(barrier="q_full", at=1),
            Wait(barrier="dv_full"),  # S takes P's columns
            Act(name="s", at=1),
            Signal(barrier="s_full", at=1),
            Wait(barrier="ds_full"),  # dP was read, too: dQ takes its columns
            Act(name="dk"),
            Act(name="dq"),
            Signal(barrier="q_empty"),
            Signal(barrier="dq_full"),
        ),
        Role.SOFTMAX: (
            Wait(barrier="q_full"),  # lse_log2 and delta
            Wait(barrier="s_full"),
            Act(name="probabilities"),
            Signal(barrier="p_full"),
            Wait(barrier="dp_full"),  # dQ of the step before left before, so dS of that step was read
            Act(name="dscores"),
            Signal(barrier="ds_full"),
        ),
        Role.REDUCE: (Wait(barrier="dq_full"), Act(name="drain"), Signal(barrier="dq_empty")),
    }
    last: dict[Role, tuple[Step, ...]] = {Role.SOFTMAX: (Wait(barrier="dq_full"), Act(name="write"))}
    program = Program(
        lanes="keys",
        tile_m=m,
        tile_n=n,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        operands=operands,
        slots=slots,
        products=products,
        barriers=_barriers(stages_q, stages_dout, {**ones, "dq_empty": reduce}),
        first=_FIRST,
        each=each,
        last=last,
        shared={},
        stages_dq=2,
    )
    return _laid_out(program, {})


def wide(head_dim: int, head_dim_v: int) -> Program:
    """Heads up to 256 wide: 128 queries and 64 keys a step, one after the other.

    dK and dV are taken transposed, 128 of their columns as lanes at a time, since 64 keys fill half the lanes. All of
    dQ has no columns of its own: its second half lies over S and dP. It leaves through the memory of P.
    """
    m, n, half = 128, 64, 128
    parts_k, parts_v = range(0, head_dim, half), range(0, head_dim_v, half)
    dk, dv, dq = 128, 128 + n * len(parts_k), 384
    operands = (
        Operand(name="k", rows=n, columns=head_dim),
        Operand(name="v", rows=n, columns=head_dim_v),
        Operand(name="q", rows=m, columns=head_dim),
        Operand(name="dout", rows=m, columns=head_dim_v),
        Operand(name="p", rows=m, columns=n),
        Operand(name="ds", rows=m, columns=n),
    )
    slots = (
        Slot(name="s", parts=((0, n),)),
        Slot(name="dp", parts=((n, n),)),
        Slot(name="dk", parts=tuple((dk + c * n // half, n) for c in parts_k)),
        Slot(name="dv", parts=tuple((dv + c * n // half, n) for c in parts_v)),
        Slot(name="dq", parts=((dq, half), (0, half))),
    )
    products = (
        Product(act="s", a="q", a_major=DEPTH, b="k", b_major=DEPTH, d="s", n=n, depth=head_dim),
        Product(act="dp", a="dout", a_major=DEPTH, b="v", b_major=DEPTH, d="dp", n=n, depth=head_dim_v),
        *(
            Product(
                act="dv",
                a="dout",
                a_major=ROWS,
                a_column=c,
                b="p",
                b_major=ROWS,
                d="dv",
                part=i,
                n=n,
                depth=m,
                sums=True,
            )
            for i, c in enumerate(parts_v)
        ),
        *(
            Product(
                act="dk", a="q", a_major=ROWS, a_column=c, b="ds", b_major=ROWS, d="dk", part=i, n=n, depth=m, sums=True
            )
            for i, c in enumerate(parts_k)
        ),
        *(
            Product(act="dq", a="ds", a_major=DEPTH, b="k", b_major=ROWS, b_column=c, d="dq", part=i, n=half, depth=n)
            for i, c in enumerate(parts_k)
        ),
    )
    softmax, reduce = WARPS[Role.SOFTMAX], WARPS[Role.REDUCE]
    ones = {"s_full": 1, "p_full": softmax, "dp_full": 1, "ds_full": softmax, "dq_full": 1}
    each: dict[Role, tuple[Step, ...]] = {
        Role.LOAD: (*_load_dout(1), *_load_q(1)),  # dO is the first to be free
        Role.MULTIPLY: (
            Wait(barrier="q_full"),
            Wait(barrier="dq_empty", at=-1),  # S and dP take the columns of dQ's second half
            Act(name="s"),
            Signal(barrier="s_full"),
            Wait(barrier="dout_full"),
            Act(name="dp"),
            Signal(barrier="dp_full"),
            Wait(barrier="p_full"),
            Act(name="dv"),
            Signal(barrier="dout_empty"),
            Wait(barrier="ds_full"),
            Act(name="dk"),
            Act(name="dq"),
            Signal(barrier="q_empty"),
            Signal(barrier="dq_full"),
        ),
        Role.SOFTMAX: (
            Wait(barrier="q_full"),
            Wait(barrier="s_full"),
            Wait(barrier="staged", at=-1),  # P takes the memory that dQ leaves through; dS was read before that
            Act(name="probabilities"),
            Signal(barrier="p_full"),
            Wait(barrier="dp_full"),
            Act(name="dscores"),
            Signal(barrier="ds_full"),
        ),
        Role.REDUCE: (
            Wait(barrier="dq_full"),  # P was read, too
            Act(name="drain"),
            Signal(barrier="dq_empty"),
            Act(name="flush"),
            Signal(barrier="staged"),
        ),
    }
    last: dict[Role, tuple[Step, ...]] = {Role.SOFTMAX: (Wait(barrier="dq_full"), Act(name="write"))}
    program = Program(
        lanes="queries",
        tile_m=m,
        tile_n=n,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        operands=operands,
        slots=slots,
        products=products,
        barriers=_barriers(1, 1, {**ones, "dq_empty": reduce, "staged": reduce}),
        first=_FIRST,
        each=each,
        last=last,
        shared={},
        stages_dq=1,
    )
    return _laid_out(program, {"dq": "p"})
