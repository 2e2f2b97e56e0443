"""Every answerable case, in every variant, by every way to a real server: the exact gradients come back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from oracle.budget import bitwise_complaints, judge
from oracle.case import AS_IS, Case, variants
from oracle.cases import ANSWERED_CASES
from oracle.exact import solved
from oracle.inputs import build_inputs
from oracle.problems import to_problem
from rig.server import Running, eventually
from rig.ways import ALWAYS_NBYTES, NEVER_NBYTES, Way, Ways

from dqkv import AsyncClient, Retry
from dqkv.client.arrays import host_tensor
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


async def test_cases_sent_all_at_once_do_not_mix(ways: Ways, server: Running) -> None:
    """As numpy arrays, on one connection for messages and one for streams; `ways` is here for its threads."""
    limits = {Way.UNARY: ALWAYS_NBYTES, Way.STREAM: NEVER_NBYTES}
    retry = Retry(attempts=100)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(server.target, inline_nbytes=limit, retry=retry))
            for limit in limits.values()
        ]
        problems = [to_problem(build_inputs(case), lambda tensor: host_tensor("", tensor)) for case in ANSWERED_CASES]
        calls = [client.submit(problem) for problem in problems for client in clients]
        answers = await asyncio.gather(*calls)
    complaints = []
    for index, case in enumerate(ANSWERED_CASES):
        for way, answer in zip(limits, answers[2 * index : 2 * index + 2], strict=True):
            complaints += [f"{case.name} by {way}: {text}" for text in judge(case, solved(case), answer, AS_IS)]
    assert not complaints, "\n".join(complaints)


def test_each_way_is_the_one_that_the_server_counts(ways: Ways, server: Running) -> None:
    case = next(case for case in ANSWERED_CASES if case.name == "gqa_12_3_dv128")
    for way in Way:
        before = {each: server.metric("dqkv_bytes_total", transport=each) for each in Way}
        ways.ask(build_inputs(case, AS_IS), way)
        eventually(server.is_quiet)
        after = {each: server.metric("dqkv_bytes_total", transport=each) for each in Way}
        assert {each for each in Way if after[each] > before[each]} == {way}
