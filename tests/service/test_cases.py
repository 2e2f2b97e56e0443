"""Every answerable case, in every variant, by every way to a real server: the exact gradients come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from oracle.budget import bitwise_complaints, judge
from oracle.case import AS_IS, Case, variants
from oracle.cases import ANSWERED_CASES
from oracle.exact import solved
from oracle.inputs import build_inputs
from rig.server import Running
from rig.ways import Way, Ways

from dqkv.client.segment import Kind

GAP = 24
"""Elements between the rows of half of the gradients that are written to regions."""


@pytest.mark.parametrize("case", ANSWERED_CASES, ids=lambda case: case.name)
def test_a_case_is_answered_exactly_by_every_way(case: Case, ways: Ways) -> None:
    complaints = []
    for index, variant in enumerate(variants(case)):
        exact = solved(variant.of(case))
        # Kinds of memory and gaps take turns, differently from case to case.
        kind = list(Kind)[(index + case.seed) % 2]
        gap = GAP * ((index + case.seed // 2) % 2)
        answers = {way: ways.ask(build_inputs(case, variant), way, kind=kind, gap=gap) for way in Way}
        for way, answer in answers.items():
            where = f"{variant.name} by {way}" + (f" ({kind}, gaps of {gap})" if way is Way.REGION else "")
            complaints += [f"{where}: {text}" for text in judge(case, exact, answer, variant)]
            assert answer.report.arch == "cpu"
            assert answer.report.softmax_lse_recomputed == (variant.softmax_lse == "absent")
        if case.deterministic:
            complaints += bitwise_complaints(replace(case, checks=("BITWISE",)), list(answers.values()))
    assert not complaints, "\n".join(complaints)


def test_each_way_is_the_one_that_the_server_counts(ways: Ways, server: Running) -> None:
    case = next(case for case in ANSWERED_CASES if case.name == "gqa_12_3_dv128")
    for way in Way:
        before = {each: server.metric("dqkv_bytes_total", transport=each) for each in Way}
        ways.ask(build_inputs(case, AS_IS), way)
        after = {each: server.metric("dqkv_bytes_total", transport=each) for each in Way}
        assert {each for each in Way if after[each] > before[each]} == {way}
