"""The order that barriers force on a program's warps: what races, what cannot go on, what takes one phase for another.

A few steps of every role become events, and what must come before what becomes edges. Two accesses to the same memory
are safe when one's end must come before the other's begin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

from dqkv_kernels.device.sm100.operand import Operand
from dqkv_kernels.device.sm100.program import TENSOR_MEMORY_COLUMNS, WARPS, Act, Program, Role, Signal, Step, Wait

STEPS = 5
"""Steps that are laid out: more than any ring is long, so that every reuse of memory is among them."""
HALVES = 2
"""Groups of softmax warps that run on their own, each with half of the columns."""

Memory = int
"""A set of places, as bits: columns of tensor memory, then 16-byte units of shared memory."""
UNIT_BYTES = 16
"""The least that anything here is placed or written by."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """A read or a write of memory, from one event to another. sums: those of the same name keep their own order."""

    what: str
    memory: Memory
    writes: bool
    begin: int
    end: int
    sums: str = ""


@dataclass(kw_only=True)
class Order:
    """Events of a program, numbered, and which must follow which."""

    program: Program
    names: list[str] = field(default_factory=list)
    after: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    accesses: list[Access] = field(default_factory=list)
    completions: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def event(self, name: str, *before: int) -> int:
        """A new event that comes after some."""
        self.names.append(name)
        for earlier in before:
            self.after[earlier].add(len(self.names) - 1)
        return len(self.names) - 1


def complaints(program: Program) -> list[str]:
    """Everything that is wrong with the order of a program's events, in words; empty when nothing is."""
    order = _laid_out(program)
    found = _unanswered(order)
    for (barrier, use), waits in order.waits.items():
        # all that arrives on a use comes before what waits for it
        for wait in waits:
            for signal in order.completions[barrier, use]:
                order.after[signal].add(wait)
    reach = _reach(order)
    if reach is None:
        return [*found, "the roles wait for each other in a circle"]
    return found + list(_unseen(program)) + list(_races(order, reach)) + list(_mistaken_phases(order, reach))


def _instances(program: Program) -> Iterator[tuple[Role, int]]:
    for role in Role:
        for part in range(HALVES if role is Role.SOFTMAX else 1):
            yield role, part


def _laid_out(program: Program) -> Order:
    order = Order(program=program)
    for role, part in _instances(program):
        now = order.event(f"{role} {part} starts")
        running: list[int] = []  # ends of what was started and nothing here has waited for
        steps: list[tuple[int, Step]] = [(0, step) for step in program.first.get(role, ())]
        for i in range(-1, STEPS):
            steps += [(i + step.at, step) for step in program.each[role] if (i >= 0 or step.at > 0)]
        steps += [(STEPS - 1 + step.at, step) for step in program.last.get(role, ())]
        for use, step in steps:
            if isinstance(step, Wait) and 0 <= use < STEPS:
                now = order.event(f"{role} waits for {step.barrier} {use}", now)
                order.waits[step.barrier, use].append(now)
            elif isinstance(step, Signal) and use < STEPS:
                # a commit and a load's bytes come after what runs; a bulk copy may still read
                awaited = running if role in (Role.MULTIPLY, Role.LOAD) else []
                arrived = order.event(f"{role} {part} completes {step.barrier} {use}", now, *awaited)
                order.completions[step.barrier, use].append(arrived)
                if role in (Role.SOFTMAX, Role.REDUCE):
                    now = arrived
                if role is Role.LOAD:
                    running = []
            elif isinstance(step, Act) and use < STEPS:
                now, running = _act(order, role, part, step, use, now, running)
    return order


def _act(
    order: Order, role: Role, part: int, step: Act, use: int, now: int, running: list[int]
) -> tuple[int, list[int]]:
    """Adds what an act does to memory; returns the role's last event and the ends of what still runs."""
    program = order.program
    name = f"{role} {part} {step.name} {use}"

    def note(what: str, memory: Memory, begin: int, end: int, *, writes: bool, sums: str = "") -> None:
        order.accesses.append(
            Access(what=f"{name}: {what}", memory=memory, writes=writes, begin=begin, end=end, sums=sums)
        )

    begin = order.event(f"{name} begins", now)
    if role is Role.MULTIPLY:
        for product in program.products_of(step.name):
            end = order.event(f"{name} ends", begin)
            for operand in {product.a, product.b}:
                note(f"reads {operand}", _operand(program, operand, use), begin, end, writes=False)
            sums = f"{product.d} {product.part}" if product.sums else ""
            note(f"writes {product.d}", _slot(program, product.d, product.part), begin, end, writes=True, sums=sums)
            running = [*running, end]
        return begin, running
    end = order.event(f"{name} ends", begin)
    if role is Role.LOAD:
        loaded = {"load_kv": ("k", "v"), "load_q": ("q", "lse_log2", "delta"), "load_dout": ("dout",)}[step.name]
        for operand in loaded:
            note(f"writes {operand}", _operand(program, operand, use), begin, end, writes=True)
        return begin, [*running, end]
    if role is Role.REDUCE and step.name == "drain":
        note("reads dq", _slot(program, "dq"), begin, end, writes=False)
        staged = _bytes(program, "dq", 0, program.shared_part_bytes("dq"))
        # its copies may read until the next flush, or where there is none, forever
        flushed = order.event(f"{name} was copied", end)
        # among themselves the copies are kept in order by the role, which reuses the buffer of the oldest
        note("passes through dq's buffers", staged, begin, flushed, writes=True, sums="dq's buffers")
        return end, [flushed]
    if role is Role.REDUCE:
        for copied in running:
            order.after[copied].add(end)
        return end, []
    if step.name == "probabilities":
        note("reads s", _half(program, "s", part), begin, end, writes=False)
        note("reads lse_log2", _operand(program, "lse_log2", use), begin, end, writes=False)
        target = (
            _slot(program, "p", part)
            if not program.operand("p").in_shared_memory
            else _half_operand(program, "p", part)
        )
        note("writes p", target, begin, end, writes=True)
    elif step.name == "dscores":
        note("reads dp", _half(program, "dp", part), begin, end, writes=False)
        note("reads delta", _operand(program, "delta", use), begin, end, writes=False)
        note("writes ds", _half_operand(program, "ds", part), begin, end, writes=True)
    elif step.name == "write":
        note("reads dk", _slot(program, "dk"), begin, end, writes=False)
        note("reads dv", _slot(program, "dv"), begin, end, writes=False)
    return end, running


def _slot(program: Program, name: str, part: int | None = None) -> Memory:
    parts = program.slot(name).parts
    return _bits(parts if part is None else parts[part : part + 1])


def _bits(ranges: Iterable[tuple[int, int]]) -> Memory:
    memory = 0
    for first, count in ranges:
        memory |= ((1 << count) - 1) << first
    return memory


def _half(program: Program, name: str, part: int) -> Memory:
    """The half of a slot's columns that half of the softmax warps read."""
    ((first, count),) = program.slot(name).parts
    return _bits([(first + part * count // HALVES, count // HALVES)])


def _bytes(program: Program, name: str, start: int, count: int) -> Memory:
    first = program.shared[name] + start
    end = -(-(first + count) // UNIT_BYTES)
    return _bits([(TENSOR_MEMORY_COLUMNS + first // UNIT_BYTES, end - first // UNIT_BYTES)])


def _operand(program: Program, name: str, use: int) -> Memory:
    if name not in program.shared:
        return _slot(program, name)
    stages = program.operand(name if name in {operand.name for operand in program.operands} else "q").stages
    nbytes = program.loaded_bytes(name)
    return _bytes(program, name, use % stages * nbytes, nbytes)


@cache
def _half_bits(operand: Operand, first_byte: int, part: int) -> Memory:
    half = operand.columns // HALVES
    units = {
        (first_byte + operand.byte_offset(row, column)) // UNIT_BYTES
        for row in range(operand.rows)
        for column in range(part * half, (part + 1) * half, 8)
    }
    return _bits((TENSOR_MEMORY_COLUMNS + unit, 1) for unit in units)


def _half_operand(program: Program, name: str, part: int) -> Memory:
    """The half of the columns of an operand that half of the softmax warps write."""
    return _half_bits(program.operand(name), program.shared[name], part)


def _unanswered(order: Order) -> list[str]:
    """Waits for what nobody, or not everybody who should, completes."""
    found = []
    for barrier, use in order.waits:
        expected = order.program.barrier(barrier).arrivals
        arrivals = sum(_arrivals(order.names[event]) for event in order.completions.get((barrier, use), ()))
        if arrivals != expected:
            found.append(f"{barrier} {use} has {arrivals} arrivals, expects {expected}")
    return found


def _unseen(program: Program) -> Iterator[str]:
    """Statistics that a warp reads without having waited, itself, for the mbarrier that their copies arrived on."""
    waited = False
    for step in program.each[Role.SOFTMAX]:
        waited |= isinstance(step, Wait) and step.at == 0 and "lse_log2" in program.barrier(step.barrier).loads
        if isinstance(step, Act) and not waited:
            yield f"{step.name} reads statistics whose barrier it has not waited for"


def _arrivals(event: str) -> int:
    role = Role(event.split(maxsplit=1)[0])
    if role in (Role.LOAD, Role.MULTIPLY):
        return 1
    return WARPS[role] // (HALVES if role is Role.SOFTMAX else 1)


def _reach(order: Order) -> list[int] | None:
    """For each event the set of those that must follow, as bits; None when they go round in a circle."""
    pending = defaultdict(int)
    for followers in order.after.values():
        for follower in followers:
            pending[follower] += 1
    ready = [event for event in range(len(order.names)) if not pending[event]]
    sequence = []
    while ready:
        event = ready.pop()
        sequence.append(event)
        for follower in order.after[event]:
            pending[follower] -= 1
            if not pending[follower]:
                ready.append(follower)
    if len(sequence) < len(order.names):
        return None
    reach = [0] * len(order.names)
    for event in reversed(sequence):
        for follower in order.after[event]:
            reach[event] |= reach[follower] | 1 << follower
    return reach


def _races(order: Order, reach: list[int]) -> Iterator[str]:
    for a, b in combinations(order.accesses, 2):
        if not (a.writes or b.writes) or not a.memory & b.memory or (a.begin == b.begin and a.end == b.end):
            continue
        # as products that add to the same columns are taken in the order in which they were started
        if a.sums and a.sums == b.sums:
            continue
        if not (reach[a.end] >> b.begin & 1 or reach[b.end] >> a.begin & 1 or b.begin == a.end or a.begin == b.end):
            yield f"{a.what} races {b.what}"


def _mistaken_phases(order: Order, reach: list[int]) -> Iterator[str]:
    """Waits that may look at a barrier when the phase before, or the one after the next, has its parity."""
    for (barrier, use), waits in order.waits.items():
        stages = order.program.barrier(barrier).stages
        for wait in waits:
            before = order.completions.get((barrier, use - stages), [])
            if before and not all(reach[event] >> wait & 1 for event in before):
                yield f"{order.names[wait]}: may look before use {use - stages} is complete"
            next_ = order.completions.get((barrier, use + stages), [])
            if next_ and not any(reach[wait] >> event & 1 for event in next_):
                yield f"{order.names[wait]}: may look after use {use + stages} is complete"
