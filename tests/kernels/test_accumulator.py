"""The orders of dq_accum: each uses every place of its block once, and what reads a place knows its row and column."""

from __future__ import annotations

import itertools

import pytest
from assembly import assemble

from dqkv_kernels.build import build
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.tiles import rows_of

accumulator = pytest.importorskip("dqkv_kernels.device.accumulator", reason="needs the compile extra")

TARGETS_OF_LANES = ("sm_90a", "sm_100a")
LANES = [(target, tile) for target in TARGETS_OF_LANES for tile in rows_of(100, target)]
WIDTHS = range(32, 257, 32)
"""Every padded head dim that a row of the table may have."""


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("tile", rows_of(90, "sm_90a"), ids=lambda tile: f"{tile.head_dim}x{tile.head_dim_v}")
def test_registers_use_every_place_once(tile, width):
    registers = tile.tile_m * tile.head_dim // tile.num_threads
    places = {
        accumulator.index(register, thread, tile.num_threads, width)
        for register in range(registers)
        for thread in range(tile.num_threads)
    }
    assert places == set(range(tile.tile_m * tile.head_dim))


def lanes_of(index, tile_m):
    """(row, column) of the float at an index: the same four columns of all rows lie side by side."""
    vector, within = divmod(index, 4 * tile_m)
    return within // 4, vector * 4 + within % 4


@pytest.mark.parametrize("width", WIDTHS)
def test_lanes_use_every_place_once_and_their_inverse_gives_back_row_and_column(width):
    tile_m = 128
    elements = itertools.product(range(tile_m), range(width))
    places = {
        (row, column): accumulator.lanes_index(row, column // 4 * 4, tile_m) + column % 4 for row, column in elements
    }
    assert sorted(places.values()) == list(range(tile_m * width))
    assert all(lanes_of(index, tile_m) == place for place, index in places.items())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_threads_that_read_lanes_take_every_vector_once(width):
    tile_m, num_threads = 128, 256
    steps = tile_m // (num_threads // 32 * accumulator.LANE_ROWS)
    taken = [
        accumulator.lanes_place(tid, step, chunk, num_threads)
        for step in range(steps)
        for chunk in range(width // accumulator.CHUNK)
        for tid in range(num_threads)
    ]
    assert sorted(taken) == [(row, column) for row in range(tile_m) for column in range(0, width, 4)]


@pytest.mark.parametrize(("target", "tile"), LANES, ids=lambda value: getattr(value, "head_dim", value))
def test_a_row_of_tensor_memory_fits_its_readers(target, tile):
    assert (tile.dq_split, tile.dq_parts) == ("lanes", 1)
    assert tile.tile_m == 128
    assert tile.head_dim % accumulator.CHUNK == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", TARGETS_OF_LANES)
def test_the_postprocess_of_tensor_memory_compiles_without_a_spill(target, tmp_path):
    keys = [
        KernelKey(
            kernel=Kernel.POSTPROCESS,
            arch=100,
            target=target,
            dtype=dtype,
            head_dim=tile.head_dim,
            head_dim_v=tile.head_dim_v,
        )
        for tile in rows_of(100, target)
        for dtype in ("bf16", "fp16", "fp32")
    ]
    assert [built.error for built in build(keys, tmp_path)] == [""] * len(keys)
    for key in keys:
        report = assemble(tmp_path / f"{key.name}.ptx", target)
        assert (report.spill_bytes, report.stack_bytes, report.warnings) == (0, 0, ())
