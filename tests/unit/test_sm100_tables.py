"""The tables of the main loop for tensor memory hold together: memory, bytes, orders, and who waits for whom."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from sm100.answer import program_of
from sm100.order import complaints

from dqkv_kernels.device.sm100.operand import (
    DEPTH,
    ROWS,
    Operand,
    Product,
    descriptor,
    descriptor_offset,
    instruction_descriptor,
)
from dqkv_kernels.device.sm100.program import (
    DRAIN_COLUMNS,
    NUM_THREADS,
    REGISTERS,
    STATISTICS,
    TENSOR_MEMORY_COLUMNS,
    WARPS,
    Act,
    Role,
    Signal,
    Slot,
    Wait,
    dq_index,
    dq_place,
)
from dqkv_kernels.tiles import SHARED_MEMORY_LIMITS, rows_of

PROGRAMS = [program_of(row) for row in rows_of(100, "sm_100a")]
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.head_dim}x{p.head_dim_v}")
REGISTERS_OF_A_CTA = 65_536
LIVE_THROUGHOUT = ("dk", "dv")
"""Sums that no other slot may lie over."""


def columns(slot):
    return {column for first, count in slot.parts for column in range(first, first + count)}


@each_program
def test_nothing_races_and_nobody_waits_in_a_circle(program):
    assert complaints(program) == []


@each_program
def test_slots_lie_in_tensor_memory_and_sums_alone(program):
    for slot in program.slots:
        assert columns(slot) <= set(range(TENSOR_MEMORY_COLUMNS))
        assert sum(count for _, count in slot.parts) == len(columns(slot))
    for name in LIVE_THROUGHOUT:
        others = set().union(*(columns(slot) for slot in program.slots if slot.name != name))
        assert not columns(program.slot(name)) & others


@each_program
def test_a_product_fits_its_operands_and_its_slot(program):
    for product in program.products:
        for name, major, column, rows in (
            (product.a, product.a_major, product.a_column, product.m),
            (product.b, product.b_major, product.b_column, product.n),
        ):
            operand = program.operand(name)
            have = (operand.rows, operand.columns) if major == DEPTH else (operand.columns - column, operand.rows)
            assert have[0] >= rows
            assert have[1] == product.depth
        assert program.slot(product.d).parts[product.part][1] == product.n
        # what tcgen05.mma takes with 128 rows
        assert product.n % 16 == 0
        assert 16 <= product.n <= 256


@each_program
def test_every_part_of_a_slot_is_made_by_one_product(program):
    made = [(product.d, product.part) for product in program.products]
    slots = [slot for slot in program.slots if slot.name != "p"]
    assert sorted(made) == sorted((slot.name, part) for slot in slots for part in range(len(slot.parts)))


@each_program
def test_all_of_dq_leaves_and_nothing_else(program):
    stages = [program.dq_column(stage) for stage in range(program.head_dim // DRAIN_COLUMNS)]
    left = [column for first in stages for column in range(first, first + DRAIN_COLUMNS)]
    parts = program.slot("dq").parts
    assert left == [column for first, count in parts for column in range(first, first + count)][: program.head_dim]


@each_program
def test_shared_memory_fits_and_only_dq_lies_over_p(program):
    assert program.shared_memory_bytes <= SHARED_MEMORY_LIMITS["sm_100a"]
    parts = {name: range(first, first + program.shared_part_bytes(name)) for name, first in program.shared.items()}
    overlapping = {
        frozenset((a, b))
        for a, b in itertools.combinations(parts, 2)
        if parts[a].start < parts[b].stop and parts[b].start < parts[a].stop
    }
    assert overlapping == (set() if program.lanes == "keys" else {frozenset(("p", "dq"))})
    for operand in program.operands:
        if operand.in_shared_memory:
            assert program.shared[operand.name] % 1024 == 0
            assert operand.stage_bytes % 1024 == 0


@each_program
def test_the_bytes_of_a_barrier_are_those_of_what_is_loaded(program):
    row_bytes = {"k": program.head_dim, "q": program.head_dim, "v": program.head_dim_v, "dout": program.head_dim_v}
    rows = {"k": program.tile_n, "v": program.tile_n, "q": program.tile_m, "dout": program.tile_m}
    acts = {"load_kv": ("k", "v"), "load_q": ("q", *STATISTICS), "load_dout": ("dout",)}
    steps = program.first[Role.LOAD] + program.each[Role.LOAD]
    loaded = set()
    for act, signal in itertools.pairwise(steps):
        if isinstance(act, Act):
            assert isinstance(signal, Signal)
            expected = sum(
                program.tile_m * 4 if name in STATISTICS else rows[name] * row_bytes[name] * 2
                for name in acts[act.name]
            )
            assert program.transaction_bytes(signal.barrier) == expected
            loaded.update(acts[act.name])
    assert loaded == {*row_bytes, *STATISTICS}
    # a phase counts up to 2^20 - 1 bytes, and a bulk copy moves multiples of 16
    assert all(program.transaction_bytes(barrier.name) < 2**20 for barrier in program.barriers)
    assert all(program.loaded_bytes(name) % 16 == 0 for name in loaded)


@pytest.mark.parametrize("width", range(32, 257, 32))
def test_the_order_of_dq_accum_and_its_inverse_are_the_identity(width):
    tile_m = 128
    elements = list(itertools.product(range(tile_m), range(width)))
    places = [dq_index(row, column, tile_m) for row, column in elements]
    assert sorted(places) == list(range(tile_m * width))
    assert [dq_place(place, tile_m) for place in places] == elements


def test_the_postprocess_reads_the_order_that_the_main_loop_leaves():
    accumulator = pytest.importorskip("dqkv_kernels.device.accumulator", reason="needs the compile extra")
    for row, column in itertools.product(range(128), range(0, 256, 4)):
        assert accumulator.lanes_index(row, column, 128) == dq_index(row, column, 128)


@pytest.mark.parametrize("major", [DEPTH, ROWS])
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (128, 128), (64, 256), (128, 256)])
def test_what_a_descriptor_says_is_where_the_elements_are(rows, columns, major):
    """Walks the canonical layout of the PTX ISA from the descriptor's fields alone."""
    operand = Operand(name="x", rows=rows, columns=columns)
    bits = descriptor(operand, major)
    leading, stride = (bits >> 16 & 0x3FFF) * 16, (bits >> 32 & 0x3FFF) * 16
    depth = columns if major == DEPTH else rows
    for step in range(depth // 16):
        begin = descriptor_offset(operand, major, step)
        for along, k in itertools.product(range(0, rows if major == DEPTH else columns, 7), range(16)):
            if major == DEPTH:
                linear = begin + along // 8 * stride + along % 8 * 128 + k * 2
                place = (along, step * 16 + k)
            else:
                linear = begin + along // 64 * leading + k // 8 * stride + k % 8 * 128 + along % 64 * 2
                place = (step * 16 + k, along)
            # the 128-byte swizzle, on addresses
            assert linear ^ (linear >> 3 & 0x70) == operand.byte_offset(*place)


def test_descriptors_are_the_compilers_own():
    """Of 128 x 128 operands, as CuTe DSL 4.8.1 writes them into its PTX."""
    operand = Operand(name="x", rows=128, columns=128)
    assert descriptor(operand, DEPTH) == 4611756662049538048
    assert descriptor(operand, ROWS) == 4611756662116581376
    product = Product(act="x", a="x", a_major=DEPTH, b="x", b_major=DEPTH, d="x", n=128, depth=128)
    assert instruction_descriptor(product, "bf16") == 136316048
    assert instruction_descriptor(replace(product, b_major=ROWS), "bf16") == 136381584
    assert instruction_descriptor(replace(product, a_major=ROWS, b_major=ROWS), "bf16") == 136414352
    assert instruction_descriptor(product, "fp16") == 136314896


def test_registers_suffice_for_all_warps():
    per_role = [REGISTERS[role] * 32 * (-(-WARPS[role] // 4) * 4) for role in (Role.SOFTMAX, Role.REDUCE, Role.LOAD)]
    assert sum(per_role) <= REGISTERS_OF_A_CTA
    assert REGISTERS[Role.MULTIPLY] == REGISTERS[Role.LOAD]
    assert all(count % 8 == 0 for count in REGISTERS.values())
    assert sum(WARPS.values()) * 32 <= NUM_THREADS


def without(program, field, role, index):
    """The program without one step of a role."""
    steps = getattr(program, field)
    return replace(program, **{field: {**steps, role: steps[role][:index] + steps[role][index + 1 :]}})


def steps_of(program, kind):
    """(field, role, index, step) of every step of a kind."""
    for field in ("first", "each", "last"):
        for role, steps in getattr(program, field).items():
            for index, step in enumerate(steps):
                if isinstance(step, kind):
                    yield field, role, index, step


def test_every_wait_is_needed():
    # a wait may be idle in one row of the table and needed in another, whose rings are of other lengths
    needed = defaultdict(bool)
    for program in PROGRAMS:
        for field, role, index, step in steps_of(program, Wait):
            name = (program.lanes, role, step.barrier)
            needed[name] |= bool(complaints(without(program, field, role, index)))
    assert [name for name, is_needed in needed.items() if not is_needed] == []


@each_program
def test_every_signal_is_needed(program):
    for field, role, index, step in steps_of(program, Signal):
        assert complaints(without(program, field, role, index)), step


def replaced(program, name, **changes):
    """The program with other facts of one slot, operand or barrier."""
    for field in ("slots", "operands", "barriers"):
        rows = getattr(program, field)
        if name in {row.name for row in rows}:
            changed = tuple(replace(row, **changes) if row.name == name else row for row in rows)
            return replace(program, **{field: changed})
    raise KeyError(name)


NARROW, WIDE = PROGRAMS[1], PROGRAMS[-1]
MUTATIONS = {
    "dq over s": replaced(NARROW, "dq", parts=((0, 128),)),
    "dp over s": replaced(NARROW, "dp", parts=((0, 128),)),
    "dq over dk": replaced(NARROW, "dq", parts=((384, 128),)),
    "p in one piece over what others read": replaced(NARROW, "p", parts=((0, 32), (32, 32))),
    "one arrival too few for p": replaced(NARROW, "p_full", arrivals=7),
    "wide dq over dv": replaced(WIDE, "dq", parts=((256, 128), (0, 128))),
    "wide s over dp": replaced(WIDE, "s", parts=((64, 64),)),
    "dq's buffers over Q": replace(WIDE, shared={**WIDE.shared, "dq": WIDE.shared["q"]}),
    "Q where dO is": replace(NARROW, shared={**NARROW.shared, "q": NARROW.shared["dout"]}),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_map_is_found(name):
    assert complaints(MUTATIONS[name])


def test_a_slot_of_no_program_is_not_found():
    with pytest.raises(KeyError):
        NARROW.slot("x")
    assert Slot(name="x", parts=()) not in NARROW.slots
