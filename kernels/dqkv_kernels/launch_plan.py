"""What one problem needs of a compiler target: kernels, tile row, table of sequences, scales and window."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dqkv import errors
from dqkv.problem import Arch, Problem
from dqkv.tensor import DType
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.tiles import ARCH_TARGETS, TARGETS, Tile, statistics_arch, tile_holding

ARCHS = {Arch.SM80: 80, Arch.SM90: 90, Arch.SM100: 100}
LOG2_E = 1.4426950408889634
GRID_LIMIT = 2**31 - 1
ROW_LIMITS = {100: 2**31 - 1}
"""Rows of one tensor, for families that name them by 32-bit coordinates of a tensor copy."""


def target_of(capability: tuple[int, int]) -> str:
    """The compiler target of a device's compute capability. Raises ArchUnavailable when it has none."""
    target = TARGETS.get(capability)
    if target is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted(TARGETS))
        raise errors.ArchUnavailable(
            f"compute capability {capability[0]}.{capability[1]} has no kernels, only {known} have", field="arch"
        )
    return target


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """What a problem needs from a compiler target: its kernels, its tile row and its sizes."""

    problem: Problem[object]
    target: str

    @cached_property
    def arch(self) -> int:
        """The arch asked for, or the newest that the target and the head dims have. Raises ArchUnavailable."""
        shape, asked = self.problem.shape, self.problem.options.arch
        wanted = sorted(ARCH_TARGETS, reverse=True) if asked is Arch.AUTO else [ARCHS.get(asked, 0)]
        for arch in wanted:
            if self.target in ARCH_TARGETS.get(arch, ()) and tile_holding(
                arch, self.target, shape.head_dim, shape.head_dim_v
            ):
                return arch
        raise errors.ArchUnavailable(
            f"arch {asked} has no kernel on {self.target} for head_dim {shape.head_dim} and {shape.head_dim_v}",
            field="arch",
        )

    @cached_property
    def tile(self) -> Tile:
        """The tile row that every kernel of the chain takes its sizes from."""
        shape = self.problem.shape
        tile = tile_holding(self.arch, self.target, shape.head_dim, shape.head_dim_v)
        if tile is None:
            raise errors.HeadDimUnsupported(f"head_dim {shape.head_dim} has no tile in arch {self.arch}", field="q")
        limit = ROW_LIMITS.get(self.arch)
        for field, rows in (("q", shape.rows_q), ("k", shape.rows_k)):
            if limit is not None and rows > limit:
                raise errors.TooLarge(f"{field} has {rows} rows, arch {self.arch} takes at most {limit}", field=field)
        return tile

    @cached_property
    def keys(self) -> dict[Kernel, KernelKey]:
        """The kernels that will run, in order."""
        dtype, grad_dtype = self.problem.dtype, self.problem.options.grad_dtype or self.problem.dtype
        softcap = self.problem.options.softcap > 0
        head_dim, head_dim_v = self.tile.head_dim, self.tile.head_dim_v

        def key(kernel: Kernel, dtype: DType, **facts: object) -> KernelKey:
            return KernelKey(
                kernel=kernel,
                arch=self.arch,
                target=self.target,
                dtype=dtype.value,
                head_dim=head_dim,
                **facts,  # type: ignore[arg-type]
            )

        keys = [
            key(Kernel.PREPROCESS, dtype, head_dim_v=head_dim_v),
            key(Kernel.MAIN_LOOP, dtype, head_dim_v=head_dim_v, softcap=softcap, grad_dtype=grad_dtype.value),
            key(Kernel.POSTPROCESS, grad_dtype, head_dim_v=head_dim_v),
        ]
        if self.problem.softmax_lse is None:
            keys.insert(0, self.statistics_key)
        return {key.kernel: key for key in keys}

    @property
    def statistics_key(self) -> KernelKey:
        """The kernel that recomputes softmax_lse."""
        return KernelKey(
            kernel=Kernel.STATISTICS,
            arch=statistics_arch(self.target),
            target=self.target,
            dtype=self.problem.dtype.value,
            head_dim=self.tile.head_dim,
            softcap=self.problem.options.softcap > 0,
        )

    @cached_property
    def tiles_q(self) -> int:
        """Tiles of the longest sequence's queries; 0 when nothing is to be launched over queries."""
        return self.tiles("q", self.tile.tile_m) if self.problem.shape.num_heads_q else 0

    @cached_property
    def tiles_k(self) -> int:
        """Tiles of the longest sequence's keys; 0 when nothing is to be launched over keys."""
        return self.tiles("k", self.tile.tile_n) if self.problem.shape.num_heads_q else 0

    @cached_property
    def tiles_in_all(self) -> int:
        """Tiles of all sequences' queries together."""
        return int((-(-self.problem.rows.q_len // self.tile.tile_m)).sum())

    @cached_property
    def owns_queries(self) -> bool:
        """Whether every row of q belongs to a sequence."""
        return int(self.problem.rows.q_len.sum()) == self.problem.shape.rows_q

    @cached_property
    def owns_keys(self) -> bool:
        """Whether every row of k belongs to a sequence."""
        return int(self.problem.rows.k_len.sum()) == self.problem.shape.rows_k

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """The table (batch_size, 8) that device/seqlen.py describes."""
        problem, rows = self.problem, self.problem.rows
        batch = np.arange(problem.shape.batch_size, dtype=np.int64)
        zero = np.zeros_like(batch)
        padded = -(-rows.q_len // self.tile.tile_m) * self.tile.tile_m
        sides = []
        for lengths, start, count in (
            (problem.queries, rows.q_start, rows.q_len),
            (problem.keys, rows.k_start, rows.k_len),
        ):
            sides += [zero, start, count] if lengths.is_packed else [batch, zero, count]
        return np.stack([*sides, np.cumsum(padded) - padded, zero], axis=1)

    @cached_property
    def padded_rows(self) -> int:
        """Rows of lse_log2, delta and dq_accum a head: each sequence's, rounded up to whole tiles."""
        return max(self.tiles_in_all, 1) * self.tile.tile_m

    @cached_property
    def scales(self) -> tuple[float, float]:
        """(inner_scale, outer_scale) as the main loop defines them."""
        scale, softcap = self.problem.softmax_scale, self.problem.options.softcap
        if softcap > 0:
            return 2 * LOG2_E * scale / softcap, softcap * LOG2_E
        return 0.0, scale * LOG2_E

    @cached_property
    def window(self) -> tuple[int, int, int]:
        """(left, right, sink_token_length), within the lengths: a bound beyond them all is as good as none."""
        window, rows = self.problem.options.window, self.problem.rows
        longest_k = int(rows.k_len.max(initial=0))
        limit = int(rows.q_len.max(initial=0)) + longest_k + 1
        left, right = (
            limit if bound is None else max(-limit, min(limit, bound)) for bound in (window.left, window.right)
        )
        return left, right, min(window.sink_token_length, longest_k)

    def tiles(self, side: str, rows: int) -> int:
        """How many tiles of so many rows the longest sequence of a side ("q" or "k") has. Raises TooLarge."""
        lengths = self.problem.rows.q_len if side == "q" else self.problem.rows.k_len
        heads = self.problem.shape.num_heads_q if side == "q" else self.problem.shape.num_heads_kv
        tiles = -(-int(lengths.max(initial=0)) // rows)
        if tiles * heads * self.problem.shape.batch_size > GRID_LIMIT:
            raise errors.TooLarge(
                f"{tiles} tiles x {heads} heads x batch_size {self.problem.shape.batch_size} "
                f"pass {GRID_LIMIT} blocks of one launch",
                field="batch_size",
            )
        return tiles
