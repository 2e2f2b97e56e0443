"""Tile sizes of the kernels, as data: a row for each class of device and padded pair of head dims, with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY_LIMITS = {"sm_80": 166_912, "sm_86": 101_376, "sm_90a": 232_448, "sm_100a": 232_448, "sm_120": 101_376}
"""Bytes of shared memory that one CTA may have, for each compiler target."""

TARGETS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_80",
    (8, 9): "sm_86",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (12, 0): "sm_120",
}
"""Compute capability -> the target whose machine code it runs (8.7 has 8.0's shared memory, 8.9 has 8.6's)."""

VECTOR_RED_TARGETS = frozenset({"sm_90a", "sm_100a", "sm_120"})
"""Targets with red.global.add.v4.f32."""

ARCH_TARGETS = {80: ("sm_80", "sm_86", "sm_90a", "sm_120"), 90: ("sm_90a",), 100: ("sm_100a",)}
"""The targets each family of kernels can be compiled for."""

UNPROVEN_ARCHS = frozenset({100})
"""Families that have run on no device of theirs yet: each machine has to see them pass their selftest first."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The sizes that all kernels of a chain share.

    head_dim, head_dim_v: padded widths. tile_m queries and tile_n keys a step; stages_q and stages_dout copies of Q and
    dO in shared memory. warps_m_s, warps_n_kv, warps_m_q: warps along the rows of S and dP, of dK and dV, and of dQ (of
    a warpgroup's part of it, where it has one). red_width: floats that one atomic instruction adds. dq_split: whether
    each warpgroup holds some "rows" or "columns" of a tile of dQ, its warps share it ("none"), or tensor memory holds
    it, a row in each of its "lanes". main_loop: the program, as device/ names them.
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stages_q: int
    stages_dout: int
    warps_m_s: int
    warps_n_kv: int
    warps_m_q: int
    num_threads: int = 256
    red_width: int = 1
    dq_split: str = "none"
    main_loop: str = "sm80"

    @property
    def dq_parts(self) -> int:
        """Into how many parts, a warpgroup each, a tile of dQ is split by rows or columns."""
        return self.num_threads // 128 if self.dq_split in ("rows", "columns") else 1

    @property
    def shared_memory_bytes(self) -> int:
        """What the main loop keeps in shared memory: K, V, stages of Q, dO and statistics, P and dS or two dS."""
        keys = 2 * self.tile_n * (self.head_dim + self.head_dim_v)
        queries = self.stages_q * (2 * self.head_dim + 4) + self.stages_dout * (2 * self.head_dim_v + 4)
        return keys + self.tile_m * queries + 4 * self.tile_m * self.tile_n + 1024


def _row(
    widths: tuple[int, int],
    steps: tuple[int, int],
    stages: int,
    warps: tuple[int, int, int],
    num_threads: int = 256,
) -> Tile:
    return Tile(
        head_dim=widths[0],
        head_dim_v=widths[1],
        tile_m=steps[0],
        tile_n=steps[1],
        stages_q=stages,
        stages_dout=stages,
        warps_m_s=warps[0],
        warps_n_kv=warps[1],
        warps_m_q=warps[2],
        num_threads=num_threads,
    )


def _wgmma_row(widths: tuple[int, int], steps: tuple[int, int], stages: tuple[int, int], main_loop: str) -> Tile:
    """Two warpgroups, each with half of the columns of dQ, or half of its 128 rows. stages: of Q and of dO."""
    row = _row(widths, steps, stages[0], (4, 4, 4))
    split = "rows" if steps[0] == 128 else "columns"
    return replace(row, stages_dout=stages[1], dq_split=split, main_loop=main_loop)


# A warp's part of each product is near square: the operands are then read from shared memory the fewest times.
_LARGE = (
    # narrow heads: a square tile halves the atomics a key; S and dP fill the registers that dK and dV leave
    _row((64, 64), (128, 128), 2, (4, 4, 4)),
    # dQ is 96 wide, which 2 warps of 16-column pairs divide and 4 do not
    _row((96, 96), (64, 128), 2, (2, 4, 4)),
    # dK and dV take 128 registers a thread, so S and dP get 32 each
    _row((128, 128), (64, 128), 2, (2, 2, 2)),
    # 96 keys of two unequal widths; a second stage of Q and dO would pass 163 KB
    _row((192, 128), (64, 96), 1, (4, 2, 2)),
    # dK and dV of 64 keys take 96 registers a thread; of 96 keys 144, which spills, as do two warps along dQ's rows
    _row((192, 192), (64, 64), 2, (4, 2, 4)),
    # two stages of 64 x 256 would pass 163 KB
    _row((256, 256), (64, 64), 1, (4, 2, 2)),
)

# 227 KB hold the second stage everywhere.
_HOPPER = tuple(replace(row, stages_q=2, stages_dout=2) for row in _LARGE)

_SMALL = (
    _row((64, 64), (64, 64), 2, (4, 4, 4)),
    _row((96, 96), (64, 64), 2, (4, 4, 4)),
    # one stage: two would take 112 KB
    _row((128, 128), (64, 64), 1, (4, 2, 2)),
    _row((192, 128), (64, 32), 1, (4, 2, 2)),
    _row((192, 192), (64, 32), 1, (4, 2, 2)),
    # 32 x 32 has work for four warps only
    _row((256, 256), (32, 32), 1, (2, 2, 2), 128),
)

# The narrow main loop overlaps two steps, so Q of three steps is alive at once, and dO of two. 96 takes the row of 128,
# since half of 96 columns is no whole number of swizzled blocks; 192 that of 256, since 192 rows of dK^T are no whole
# number of 64-row products for each of two warpgroups.
_WGMMA = (
    # 128 queries a step halve the barriers a key; dP starts after the softmax, or its registers would spill
    _wgmma_row((64, 64), (128, 128), (3, 2), "sm90"),
    _wgmma_row((128, 128), (64, 128), (3, 2), "sm90"),
    # dK^T and dV^T of 64 keys take 128 registers a thread, of 128 keys they do not fit
    _wgmma_row((256, 128), (64, 64), (2, 2), "sm90_wide"),
    _wgmma_row((256, 256), (64, 64), (2, 2), "sm90_wide"),
)


def _tcgen05_row(widths: tuple[int, int], tile_n: int, stages: tuple[int, int], main_loop: str) -> Tile:
    """128 queries a step, as many as tensor memory has lanes. stages: of Q and of dO."""
    row = _row(widths, (128, tile_n), stages[0], (4, 4, 4))
    return replace(row, stages_dout=stages[1], dq_split="lanes", main_loop=main_loop)


_TCGEN05 = (
    # S, P, dP, dK, dV and dQ all fit the 512 columns of tensor memory
    _tcgen05_row((64, 64), 128, (2, 2), "sm100"),
    # dQ takes the columns of dP
    _tcgen05_row((128, 128), 128, (2, 1), "sm100"),
    # dK and dV of 64 keys, transposed, leave room for half of dQ; the other half takes the columns of S and dP
    _tcgen05_row((256, 128), 64, (1, 1), "sm100_wide"),
    _tcgen05_row((256, 256), 64, (1, 1), "sm100_wide"),
)

_ROWS = {
    (80, "sm_80"): _LARGE,
    (80, "sm_86"): _SMALL,
    (80, "sm_90a"): _HOPPER,
    (80, "sm_120"): _SMALL,
    (90, "sm_90a"): _WGMMA,
    (100, "sm_100a"): _TCGEN05,
    # for the postprocess alone: the order of its accumulator can be run where there is no tensor memory
    (100, "sm_90a"): _TCGEN05,
}


def statistics_arch(target: str) -> int:
    """The family whose statistics kernel every chain on a target uses: they are the same but for the target."""
    return min(arch for arch, targets in ARCH_TARGETS.items() if target in targets)


def rows_of(arch: int, target: str) -> tuple[Tile, ...]:
    """The tile rows of an arch compiled for a target, cheapest first. Raises KeyError for a pair that is not made."""
    red_width = 4 if target in VECTOR_RED_TARGETS else 1
    return tuple(replace(row, red_width=red_width) for row in _ROWS[arch, target])


def tile_holding(arch: int, target: str, head_dim: int, head_dim_v: int) -> Tile | None:
    """The first row that a problem's head dims fit in, or None when none is that wide."""
    return next(
        (row for row in rows_of(arch, target) if head_dim <= row.head_dim and head_dim_v <= row.head_dim_v), None
    )


def tile_for(arch: int, target: str, head_dim: int, head_dim_v: int) -> Tile:
    """The row of exactly these padded widths. Raises KeyError for widths, an arch or a target not here."""
    return {(row.head_dim, row.head_dim_v): row for row in rows_of(arch, target)}[head_dim, head_dim_v]
