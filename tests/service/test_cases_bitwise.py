"""Answers that must be the same bit for bit: again, on another device, and while the server does other work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from oracle.budget import BITWISE_CHECKS, bitwise_complaints, judge
from oracle.case import AS_IS, Case
from oracle.cases import ANSWERED_CASES, BY_NAME
from oracle.exact import solved
from oracle.inputs import build_inputs
from rig.server import running
from rig.ways import Way, Ways

BITWISE = [case for case in ANSWERED_CASES if case.deterministic or not BITWISE_CHECKS.keys().isdisjoint(case.checks)]
REPEATS = 4
DEVICES = ("cpu:0", "cpu:1")
OTHER_WORK = BY_NAME["softcap50_window_gqa"]
ROUNDS_LIMIT = 50
STARTS = 5


@pytest.fixture(scope="module")
def busy() -> Iterator[Ways]:
    """A server with two devices of two threads, which are kept busy by somebody else.

    One that was measured while this machine stood still gets no work before the other has a lot: then another server.
    """
    for _ in range(STARTS):
        with busy_server() as one:
            inputs, seen = build_inputs(OTHER_WORK), set()
            for _ in range(ROUNDS_LIMIT):
                seen.add(one.ask(inputs, Way.UNARY).report.device)
                if seen == set(DEVICES):
                    yield one
                    return
    pytest.fail("one of the devices gets no work")


@contextmanager
def busy_server() -> Iterator[Ways]:
    stop = threading.Event()

    def work(target: str) -> None:
        with Ways(target) as other:
            inputs = build_inputs(OTHER_WORK)
            while not stop.is_set():
                other.ask(inputs, Way.UNARY)

    with running(cpu_devices=str(len(DEVICES)), cpu_threads="2") as server:
        others = [threading.Thread(target=work, args=(server.target,)) for _ in range(2)]
        for other in others:
            other.start()
        try:
            with Ways(server.target) as one:
                yield one
        finally:
            stop.set()
            for other in others:
                other.join()


@pytest.mark.parametrize("case", BITWISE, ids=lambda case: case.name)
def test_an_answer_is_the_same_bit_for_bit(case: Case, ways: Ways, busy: Ways) -> None:
    checked = replace(case, checks=("BITWISE",)) if case.deterministic else case
    inputs = build_inputs(case)
    alone = [ways.ask(inputs, Way.UNARY) for _ in range(REPEATS)]
    assert judge(case, solved(case), alone[0], AS_IS) == []
    assert bitwise_complaints(checked, alone) == []
    among_others, seen = [], set()
    while len(among_others) < ROUNDS_LIMIT and (len(among_others) < REPEATS or seen != set(DEVICES)):
        way = list(Way)[len(among_others) % len(Way)]
        among_others.append(busy.ask(inputs, way))
        seen.add(among_others[-1].report.device)
    assert seen == set(DEVICES)
    assert bitwise_complaints(checked, [alone[0], *among_others]) == []
