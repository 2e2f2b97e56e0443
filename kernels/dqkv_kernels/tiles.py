"""Tile sizes of the kernels, as data: a row for each class of device and padded pair of head dims, with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY_LIMITS = {"sm_80": 166_912, "sm_86": 101_376, "sm_90a": 232_448, "sm_120": 101_376}
"""Bytes of shared memory that one CTA may have, for each compiler target."""

TARGETS = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_80", (8, 9): "sm_86", (9, 0): "sm_90a", (12, 0): "sm_120"}
"""Compute capability -> the target whose machine code it runs (8.7 has 8.0's shared memory, 8.9 has 8.6's)."""

VECTOR_RED_TARGETS = frozenset({"sm_90a", "sm_120"})
"""Targets with red.global.add.v4.f32."""

ARCH_TARGETS = {80: ("sm_80", "sm_86", "sm_90a", "sm_120")}
"""The targets each family of kernels can be compiled for."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The sizes that all kernels of a chain share.

    head_dim, head_dim_v: padded widths. tile_m queries and tile_n keys a step; num_stages copies of Q and dO in shared
    memory; warps_m_s, warps_n_kv, warps_m_q: warps along the rows of S and dP, of dK and dV, and of dQ. red_width:
    floats that one atomic instruction adds.
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    num_stages: int
    warps_m_s: int
    warps_n_kv: int
    warps_m_q: int
    num_threads: int = 256
    red_width: int = 1

    @property
    def shared_memory_bytes(self) -> int:
        """What the main loop keeps in shared memory: K, V, stages of Q, dO and two fp32 statistics, P and dS."""
        width = self.head_dim + self.head_dim_v
        queries = self.num_stages * self.tile_m * (2 * width + 8)
        return 2 * self.tile_n * width + queries + 4 * self.tile_m * self.tile_n


def _row(
    widths: tuple[int, int],
    steps: tuple[int, int],
    num_stages: int,
    warps: tuple[int, int, int],
    num_threads: int = 256,
) -> Tile:
    return Tile(
        head_dim=widths[0],
        head_dim_v=widths[1],
        tile_m=steps[0],
        tile_n=steps[1],
        num_stages=num_stages,
        warps_m_s=warps[0],
        warps_n_kv=warps[1],
        warps_m_q=warps[2],
        num_threads=num_threads,
    )


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
    # dK and dV of 64 keys take 96 registers a thread, of 96 keys 144, which would spill
    _row((192, 192), (64, 64), 2, (4, 2, 2)),
    # two stages of 64 x 256 would pass 163 KB
    _row((256, 256), (64, 64), 1, (4, 2, 2)),
)

# 227 KB hold the second stage everywhere.
_HOPPER = tuple(replace(row, num_stages=2) for row in _LARGE)

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

_ROWS = {"sm_80": _LARGE, "sm_86": _SMALL, "sm_90a": _HOPPER, "sm_120": _SMALL}

PADDED_WIDTHS = tuple((row.head_dim, row.head_dim_v) for row in _LARGE)
"""The padded pairs (head_dim, head_dim_v), cheapest first; other head dims run in the first pair that holds them."""


def padded_widths(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The padded pair that a problem's head dims run in. Raises ValueError above 256."""
    for pair in PADDED_WIDTHS:
        if head_dim <= pair[0] and head_dim_v <= pair[1]:
            return pair
    raise ValueError(f"head_dim {head_dim} and head_dim_v {head_dim_v}: at most {PADDED_WIDTHS[-1]}")


def tile_for(target: str, head_dim: int, head_dim_v: int) -> Tile:
    """The tile row of a compiler target and a padded pair of widths. Raises KeyError for a pair or target not here."""
    red_width = 4 if target in VECTOR_RED_TARGETS else 1
    rows = {(row.head_dim, row.head_dim_v): row for row in _ROWS[target]}
    return replace(rows[head_dim, head_dim_v], red_width=red_width)
