"""What is decided before any launch: which kernels a problem needs, its table of sequences, scales and window."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from oracle.case import variants
from oracle.cases import ANSWERED_CASES, BY_NAME, HEAD_DIM_CASES
from oracle.inputs import build_inputs
from oracle.problems import as_given, to_problem

from dqkv import errors
from dqkv_kernels.build import default_set
from dqkv_kernels.key import KernelKey
from dqkv_kernels.launch_plan import LaunchPlan, target_of
from dqkv_kernels.tiles import ARCH_TARGETS, TARGETS, rows_of, tile_holding

PAIRS = [(arch, target) for arch, targets in ARCH_TARGETS.items() for target in targets]


def plan_of(name: str, target: str = "sm_90a") -> LaunchPlan:
    return LaunchPlan(problem=to_problem(build_inputs(BY_NAME[name]), as_given), target=target)


def ready_on(target: str) -> set[KernelKey]:
    return {key for arch, targets in ARCH_TARGETS.items() if target in targets for key in default_set(arch, target)}


@pytest.mark.parametrize("case", ANSWERED_CASES + HEAD_DIM_CASES, ids=lambda case: case.name)
def test_the_default_sets_answer_every_case_on_every_target(case):
    for variant in variants(case):
        if variant.dtype == "fp32":
            continue
        inputs = build_inputs(case, variant)
        for target in set(TARGETS.values()):
            lowest = min(arch for arch, targets in ARCH_TARGETS.items() if target in targets)
            for arch in ("auto", f"sm{lowest}"):
                problem = to_problem(dataclasses.replace(inputs, arch=arch), as_given)
                assert set(LaunchPlan(problem=problem, target=target).keys.values()) <= ready_on(target)


def test_a_family_runs_on_its_own_targets_alone():
    problem = to_problem(dataclasses.replace(build_inputs(BY_NAME["hd128_dv96"]), arch="sm90"), as_given)
    assert LaunchPlan(problem=problem, target="sm_90a").arch == 90
    for target in ("sm_80", "sm_86", "sm_100a", "sm_120"):
        with pytest.raises(errors.ArchUnavailable, match="sm90"):
            _ = LaunchPlan(problem=problem, target=target).arch


@pytest.mark.parametrize("case", ANSWERED_CASES, ids=lambda case: case.name)
def test_sequences_never_share_padded_rows(case):
    plan = LaunchPlan(problem=to_problem(build_inputs(case), as_given), target="sm_90a")
    rows, tile_m = plan.problem.rows, plan.tile.tile_m
    begin = plan.sequences[:, 6]
    end = begin + -(-rows.q_len // tile_m) * tile_m
    assert not (begin % tile_m).any()
    assert (begin[1:] >= end[:-1]).all()
    assert end.max(initial=0) <= plan.padded_rows


def test_a_table_says_where_packed_and_dense_rows_lie():
    plan = plan_of("packed_q_dense_k_seqused")
    expected = np.array([[0, 0, 40, 0, 0, 96], [0, 40, 1, 1, 0, 13], [0, 41, 97, 2, 0, 64]])
    assert (plan.sequences[:, :6] == expected).all()


@pytest.mark.parametrize(("arch", "target"), PAIRS)
def test_every_pair_of_head_dims_has_the_first_row_that_holds_it(arch, target):
    rows = rows_of(arch, target)
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        tile = tile_holding(arch, target, head_dim, head_dim_v)
        before = rows[: rows.index(tile)]
        assert tile.head_dim >= head_dim
        assert tile.head_dim_v >= head_dim_v
        assert not any(row.head_dim >= head_dim and row.head_dim_v >= head_dim_v for row in before)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(264, 8), (8, 264)])
@pytest.mark.parametrize(("arch", "target"), PAIRS)
def test_wider_heads_have_no_row(arch, target, head_dim, head_dim_v):
    assert tile_holding(arch, target, head_dim, head_dim_v) is None


def test_a_window_stays_within_what_int32_holds():
    left, right, sinks = plan_of("window_larger_than_sequence").window
    assert left == right == 90 + 140 + 1
    assert sinks == 0


@pytest.mark.parametrize("capability", [(7, 5), (10, 3), (11, 0)])
def test_a_device_without_kernels_is_refused_in_words(capability):
    with pytest.raises(errors.ArchUnavailable, match=f"{capability[0]}.{capability[1]} has no kernels"):
        target_of(capability)


@pytest.mark.parametrize("side", ["q", "k"])
def test_more_rows_than_a_tensor_copy_can_name_are_refused(side):
    problem = plan_of("noncausal_square_128", "sm_100a").problem
    shape = dataclasses.replace(problem.shape, **{f"rows_{side}": 2**31})
    large = SimpleNamespace(shape=shape, options=problem.options)
    with pytest.raises(errors.TooLarge, match=f"{side} has {2**31} rows, arch 100"):
        _ = LaunchPlan(problem=large, target="sm_100a").tile


@pytest.mark.parametrize("target", ARCH_TARGETS[80])
def test_warps_share_every_tile_evenly(target):
    for tile in rows_of(80, target):
        warps = tile.num_threads // 32
        for rows, columns, warps_rows in (
            (tile.tile_m, tile.tile_n, tile.warps_m_s),
            (tile.tile_n, tile.head_dim, tile.warps_n_kv),
            (tile.tile_n, tile.head_dim_v, tile.warps_n_kv),
            (tile.tile_m, tile.head_dim, tile.warps_m_q),
        ):
            assert rows % (16 * warps_rows) == 0
            assert columns % (16 * (warps // warps_rows)) == 0


def test_names_of_kernels_are_all_different_and_give_back_their_key():
    keys = [key for arch, target in PAIRS for key in default_set(arch, target)]
    assert len({key.name for key in keys}) == len(keys)
    assert all(KernelKey.from_dict(key.as_dict()) == key for key in keys)


@pytest.mark.parametrize(("arch", "target"), [(80, "sm_100a"), (100, "sm_90a"), (80, "sm_90"), (70, "sm_80")])
def test_a_set_for_a_pair_that_is_not_made_is_refused(arch, target):
    with pytest.raises(errors.ArchUnavailable, match=f"arch {arch} for target {target}"):
        default_set(arch, target)


def test_a_bound_of_the_lengths_asks_for_no_other_kernel():
    problem = to_problem(build_inputs(BY_NAME["varlen_tile_straddle"]), as_given)
    longest = max(problem.shape.seqlen_q, problem.shape.seqlen_k)
    plans = [
        LaunchPlan(
            problem=dataclasses.replace(
                problem,
                queries=dataclasses.replace(problem.queries, max_seqlen=bound),
                keys=dataclasses.replace(problem.keys, max_seqlen=bound),
            ),
            target="sm_90a",
        )
        for bound in (None, *range(longest, longest + 20))
    ]
    assert len({tuple(plan.keys.values()) for plan in plans}) == 1
