"""The main loop for tensor memory on the host: its program's roles side by side, in torch, in any order they may take.

Everything that decides an answer is read from the program: which products are taken and of what, where they land in
tensor memory, what shared memory holds when, who waits for whom. Copies, products and bulk adds are done some time
after they were started, in the order in which their kind of unit was given them; a seed chooses when. Memory that
nothing was written to holds NaN.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dqkv_kernels.device.sm100.operand import DEPTH, Product
from dqkv_kernels.device.sm100.program import (
    DRAIN_COLUMNS,
    TENSOR_MEMORY_COLUMNS,
    WARPS,
    Act,
    Program,
    Role,
    Signal,
    Step,
    Wait,
    dq_place,
)
from sm100.masks import masks, seen

LANES = 128
HALVES = 2


class Stuck(Exception):
    """No role can go on, though some are not done."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one CTA works on: a tile of keys of a head, and the queries of all heads that share it.

    k, v (seqlen_k, padded width), q, dout (heads, seqlen_q, padded width) in the inputs' dtype, read past their ends as
    zeros; lse_log2, delta (heads, rows padded to whole tiles) fp32; mask: the kernels' own; scales: inner and outer;
    head_dim: columns of q and k that are not padding.
    """

    n: int
    k: Tensor
    v: Tensor
    q: Tensor
    dout: Tensor
    lse_log2: Tensor
    delta: Tensor
    mask: Any
    scales: tuple[float, float]
    softcap: bool
    head_dim: int


@dataclass(kw_only=True)
class _Ring:
    """mbarriers of one name: arrivals still expected by the phase at hand, and phases done, of each."""

    expected: int
    left: list[int]
    done: list[int]


@dataclass(kw_only=True)
class Cta:
    """One CTA at work. dq_accum: (heads, tiles_m, floats of a block), added to in the order that chance takes."""

    program: Program
    tile: Tile
    dq_accum: Tensor
    chance: random.Random
    shared: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    rings: dict[str, _Ring] = field(default_factory=dict)
    columns: Tensor = field(init=False)
    kept: dict[int, Tensor] = field(default_factory=dict)
    units: dict[str, deque[Callable[[], None]]] = field(default_factory=dict)
    dk: Tensor = field(init=False)
    dv: Tensor = field(init=False)

    def run(self) -> tuple[Tensor, Tensor]:
        """(dk, dv) of the tile's keys, fp32, dk without the scale. Raises Stuck."""
        program, dtype = self.program, self.tile.q.dtype
        self.columns = torch.full((LANES, TENSOR_MEMORY_COLUMNS), float("nan"))
        for operand in program.operands:
            for stage in range(operand.stages):
                self.shared[operand.name, stage] = torch.full(
                    (operand.rows, operand.columns), float("nan"), dtype=dtype
                )
        for barrier in program.barriers:
            left = [barrier.arrivals] * barrier.stages
            self.rings[barrier.name] = _Ring(expected=barrier.arrivals, left=left, done=[0] * barrier.stages)
        self.units = {"tensor copies": deque(), "products": deque(), "bulk adds": deque()}
        self.dk = torch.zeros(program.tile_n, program.head_dim)
        self.dv = torch.zeros(program.tile_n, program.head_dim_v)
        if self.total:
            self._go()
        return self.dk, self.dv

    @property
    def tiles_m(self) -> range:
        """Tiles of queries that see this tile of keys."""
        mask, n = self.tile.mask, self.tile.n
        return range(masks().first_m(mask, n), masks().end_m(mask, n))

    @property
    def total(self) -> int:
        """Steps: those tiles, for each head."""
        return len(self.tiles_m) * self.tile.q.shape[0]

    def _go(self) -> None:
        roles = {
            (role, part): self._role(role, part)
            for role in Role
            for part in range(HALVES if role is Role.SOFTMAX else 1)
        }
        waiting: dict[tuple[Role, int], tuple[str, int] | None] = dict.fromkeys(roles)
        speeds = {key: 10 ** self.chance.uniform(-2, 0) for key in (*roles, *self.units)}
        while roles or any(self.units.values()):
            ready: list[Any] = [key for key in roles if waiting[key] is None or self._is_complete(*waiting[key])]
            ready += [name for name, queue in self.units.items() if queue]
            if not ready:
                raise Stuck(f"{ {str(key[0]): waiting[key] for key in roles} }")
            (chosen,) = self.chance.choices(ready, [speeds[key] for key in ready])
            if isinstance(chosen, str):
                self.units[chosen].popleft()()
                continue
            try:
                waiting[chosen] = next(roles[chosen])
            except StopIteration:
                del roles[chosen]

    def _role(self, role: Role, part: int) -> Iterator[tuple[str, int] | None]:
        """Yields what the role waits for, or None when it could go on at once."""
        program, total = self.program, self.total
        for step in program.first.get(role, ()):
            yield from self._step(role, part, step, step.at)
        for i in range(-1, total):
            for step in program.each[role]:
                if (i >= 0 or step.at > 0) and i + step.at < total:
                    yield from self._step(role, part, step, i + step.at)
        for step in program.last.get(role, ()):
            yield from self._step(role, part, step, total - 1 + step.at)

    def _step(self, role: Role, part: int, step: Step, use: int) -> Iterator[tuple[str, int] | None]:
        if isinstance(step, Wait):
            if use >= 0:
                yield step.barrier, use
        elif isinstance(step, Signal):
            if role is Role.MULTIPLY:
                self.units["products"].append(lambda: self._arrive(step.barrier, use, 1))
            elif role is Role.LOAD:
                self.units["tensor copies"].append(lambda: self._arrive(step.barrier, use, 1))
            else:
                self._arrive(step.barrier, use, WARPS[role] // (HALVES if role is Role.SOFTMAX else 1))
            yield None
        else:
            act = {
                Role.LOAD: self._load,
                Role.MULTIPLY: self._multiply,
                Role.SOFTMAX: self._softmax,
                Role.REDUCE: self._reduce,
            }[role]
            yield from act(step, part, use)

    def _is_complete(self, barrier: str, use: int) -> bool:
        """Whether the parity of the phase says so: what a warp sees, which knows no more than one bit."""
        stages = self.program.barrier(barrier).stages
        done = self.rings[barrier].done[use % stages]
        return (done - 1) % 2 == (use // stages) % 2

    def _arrive(self, barrier: str, use: int, arrivals: int) -> None:
        ring, stage = self.rings[barrier], use % self.program.barrier(barrier).stages
        ring.left[stage] -= arrivals
        if ring.left[stage] == 0:
            ring.left[stage], ring.done[stage] = ring.expected, ring.done[stage] + 1

    def _walk(self, use: int) -> tuple[int, int]:
        """(head, tile of queries) of a step."""
        head, m = divmod(use, len(self.tiles_m))
        return head, self.tiles_m[m]

    def _load(self, step: Act, part: int, use: int) -> Iterator[None]:
        program, tile = self.program, self.tile
        if step.name == "load_kv":
            sources = [(name, tensor, tile.n * program.tile_n) for name, tensor in (("k", tile.k), ("v", tile.v))]
        else:
            head, m = self._walk(use)
            tensor = tile.q if step.name == "load_q" else tile.dout
            sources = [(step.name.removeprefix("load_"), tensor[head], m * program.tile_m)]
        for name, tensor, row in sources:
            operand = program.operand(name)
            stage = use % operand.stages

            def copied(name: str = name, tensor: Tensor = tensor, row: int = row, stage: int = stage) -> None:
                rows = tensor[row : row + self.program.operand(name).rows]
                self.shared[name, stage].zero_()  # rows past the sequence were cleared
                self.shared[name, stage][: len(rows)] = rows

            self.units["tensor copies"].append(copied)
        if step.name == "load_q":
            rows = slice(m * program.tile_m, (m + 1) * program.tile_m)
            stage = use % program.operand("q").stages
            for name, statistics in (("lse_log2", tile.lse_log2), ("delta", tile.delta)):
                self.units["tensor copies"].append(
                    lambda name=name, values=statistics[head, rows]: self.shared.update({(name, stage): values.clone()})  # type: ignore[misc]
                )
        yield None

    def _multiply(self, step: Act, part: int, use: int) -> Iterator[None]:
        for product in self.program.products_of(step.name):
            self.units["products"].append(lambda product=product: self._product(product, use))  # type: ignore[misc]
        yield None

    def _product(self, product: Product, use: int) -> None:
        left = self._rows_of(product.a, product.a_major, product.a_column, product.m, product.depth, use)
        right = self._rows_of(product.b, product.b_major, product.b_column, product.n, product.depth, use)
        first, columns = self.program.slot(product.d).parts[product.part]
        result = self.columns[:, first : first + columns]
        value = left.float() @ right.float().T
        result.copy_(result + value if product.sums and use else value)

    def _rows_of(self, name: str, major: str, column: int, rows: int, depth: int, use: int) -> Tensor:
        """An operand of a product as (rows, depth)."""
        operand = self.program.operand(name)
        if not operand.in_shared_memory:
            parts = [self.columns[:, first : first + count] for first, count in self.program.slot(name).parts]
            return torch.cat([part.contiguous().view(self.tile.q.dtype) for part in parts], 1)[:rows, :depth]
        stored = self.shared[name, use % operand.stages]
        if major == DEPTH:
            return stored[:rows, :depth]
        return stored[:depth, column : column + rows].T

    def _softmax(self, step: Act, part: int, use: int) -> Iterator[None]:
        program, tile = self.program, self.tile
        first, count = program.slot("s").parts[0]
        half = slice(part * count // HALVES, (part + 1) * count // HALVES)
        if step.name == "write":
            if part == 0:
                self.dk, self.dv = (self._gradient(name) for name in ("dk", "dv"))
            yield None
            return
        stage = use % program.operand("q").stages
        by_lanes = program.lanes == "queries"

        def of_queries(name: str) -> Tensor:
            values = self.shared[name, stage]
            return values[:, None] if by_lanes else values[None, half]

        if step.name == "probabilities":
            scores = self.columns[:, first + half.start : first + half.stop].clone()
            _, m = self._walk(use)
            queries = m * program.tile_m + torch.arange(program.tile_m)
            keys = tile.n * program.tile_n + torch.arange(program.tile_n)
            visible = seen(tile.mask, queries, keys)
            visible = (visible if by_lanes else visible.T)[:, half]
            yield None
            p, kept = _probabilities(scores, of_queries("lse_log2"), visible, tile.scales, softcap=tile.softcap)
            self.kept[part] = kept
            yield None
            self._put("p", part, half, p)
        else:
            first, _ = program.slot("dp").parts[0]
            dp = self.columns[:, first + half.start : first + half.stop].clone()
            yield None
            self._put("ds", part, half, self.kept[part] * (dp - of_queries("delta")))
        yield None

    def _put(self, name: str, part: int, half: slice, values: Tensor) -> None:
        """Rounds half of the columns of P or dS and writes them where products read them."""
        rounded = values.to(self.tile.q.dtype)
        if self.program.operand(name).in_shared_memory:
            self._spoil(name)
            self.shared[name, 0][:, half] = rounded
            return
        first, count = self.program.slot(name).parts[part]
        self.columns[:, first : first + count] = rounded.contiguous().view(torch.float32)

    def _gradient(self, name: str) -> Tensor:
        parts = [self.columns[:, first : first + count] for first, count in self.program.slot(name).parts]
        if self.program.lanes == "keys":
            return parts[0].clone()
        return torch.cat([part.T for part in parts], 1)

    def _reduce(self, step: Act, part: int, use: int) -> Iterator[None]:
        program = self.program
        queue = self.units["bulk adds"]
        if step.name == "flush":
            while queue:
                yield None
            return
        head, m = self._walk(use)
        per_stage = program.tile_m * DRAIN_COLUMNS
        rows, columns = _places(program.tile_m, DRAIN_COLUMNS)
        for stage in range(program.head_dim // DRAIN_COLUMNS):
            if stage * DRAIN_COLUMNS >= self.tile.head_dim:
                continue
            while len(queue) > program.copies_running(stage):
                yield None
            first = program.dq_column(stage)
            values = self.columns[:, first : first + DRAIN_COLUMNS][rows, columns]
            buffer = self._staging(stage % program.stages_dq, values)
            target = self.dq_accum[head, m, stage * per_stage : (stage + 1) * per_stage]
            queue.append(lambda target=target, buffer=buffer: target.add_(self._staged(buffer, per_stage)))  # type: ignore[misc]
            yield None

    def _staging(self, stage: int, values: Tensor) -> tuple[str, int]:
        """Puts a stage of dQ into its buffer; returns the buffer's name."""
        self._spoil("dq")
        self.shared["dq", stage] = values.clone()
        return "dq", stage

    def _spoil(self, name: str) -> None:
        """What else lies in the memory that is now written to is lost."""
        places = self.program.shared
        for other, stage in self.shared:
            if other != name and places.get(other) == places[name]:
                self.shared[other, stage].fill_(float("nan"))

    def _staged(self, buffer: tuple[str, int], count: int) -> Tensor:
        return self.shared[buffer][:count]


def _probabilities(
    scores: Tensor, lse_log2: Tensor, visible: Tensor, scales: tuple[float, float], *, softcap: bool
) -> tuple[Tensor, Tensor]:
    """(P, P times the slope of the softcap), fp32, as device/softmax.py makes them."""
    inner, outer = scales
    if not softcap:
        exponent = torch.where(visible, scores * outer - lse_log2, -torch.inf)
        p = torch.exp2(exponent)
        return p, p
    r = 1 / (torch.exp2(scores * inner) + 1)
    p = torch.exp2(r * (-2 * outer) + (outer - lse_log2))
    slope = p * (r * (4 - 4 * r))
    return torch.where(visible, p, 0.0), torch.where(visible, slope, 0.0)


@cache
def _places(tile_m: int, columns: int) -> tuple[Tensor, Tensor]:
    """Row and column of each float of a stage of dQ, in the order of dq_accum."""
    places = [dq_place(index, tile_m) for index in range(tile_m * columns)]
    rows, within = zip(*places, strict=True)
    return torch.tensor(rows), torch.tensor(within)
