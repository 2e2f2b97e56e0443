"""head_dim and head_dim_v at every multiple of 8 up to 256: causal, grouped, lengths that no tile divides."""

from __future__ import annotations

import pytest
from oracle.budget import judge
from oracle.case import AS_IS, Case
from oracle.cases import HEAD_DIM_CASES
from oracle.exact import solved
from oracle.inputs import build_inputs
from rig.ways import Way, Ways

from dqkv.client.segment import Kind


@pytest.mark.parametrize(
    ("case", "way"),
    [(case, list(Way)[index % len(Way)]) for index, case in enumerate(HEAD_DIM_CASES)],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_a_head_dim_is_answered_exactly(case: Case, way: Way, ways: Ways) -> None:
    kind = list(Kind)[case.seed % 2]
    answer = ways.ask(build_inputs(case), way, kind=kind, gap=8 * (case.seed // 2 % 2))
    assert judge(case, solved(case), answer, AS_IS) == []


def test_every_width_is_once_both_widths_and_once_that_of_values_alone() -> None:
    widths = list(range(8, 257, 8))
    both = [case for case in HEAD_DIM_CASES if case.head_dim == case.head_dim_v]
    assert [case.head_dim for case in both] == widths
    assert [case.head_dim_v for case in HEAD_DIM_CASES if case not in both] == widths
    assert all(case.causal and case.group_size == 2 for case in HEAD_DIM_CASES)
