"""One caller's flood and another's single requests: turns are shared by predicted seconds, not by who came first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from rig import regional
from rig.caller import Caller
from rig.memory import PosixMemory
from rig.process import wait_for
from rig.server import Running
from rig.wire import assert_right, inline_gradients, sample

from dqkv.v1 import gradient_pb2 as pb

ONE = sample(512, 4, 64)
FLOOD = 100
TURNS = 5
ALLOWANCE_S = 0.15
"""For a machine that does other things, too."""


def timed(call: Callable[[], pb.BackwardResponse]) -> float:
    began = time.perf_counter()
    answer = call()
    took_s = time.perf_counter() - began
    assert_right(ONE, inline_gradients(ONE, answer))
    return took_s


def test_a_flood_of_one_caller_delays_anothers_request_by_two_requests_at_most(server: Running) -> None:
    """The one that runs already and one turn: a hundred that wait do not come before it."""
    with Caller(server) as flooder, Caller(server) as other, PosixMemory(regional.nbytes(ONE)) as memory:
        regional.fill(memory.bytes, ONE)
        with PosixMemory(regional.nbytes(ONE)) as own:
            regional.fill(own.bytes, ONE)
            # By region: the flood is one of work, not of bytes.
            flood, single = (
                regional.request(ONE, caller.register(place)) for caller, place in ((flooder, memory), (other, own))
            )
            for request in (flood, single):
                del request.problem.outputs[:]

            def ask() -> pb.BackwardResponse:
                answer: pb.BackwardResponse = other.ask(other.gradients.Backward, single)
                return answer

            timed(ask)
            alone = [timed(ask) for _ in range(TURNS)]
            futures = [
                flooder.gradients.Backward.future(flood, timeout=60, metadata=flooder.metadata) for _ in range(FLOOD)
            ]
            wait_for(lambda: server.metric("dqkv_queue_depth") > FLOOD / 2, "the flood waits")
            beside = [timed(ask) for _ in range(TURNS)]
            still_waiting = server.metric("dqkv_queue_depth")
            answered_s = [future.result().report.device_s for future in futures]
    request_s = max(statistics.median(answered_s), statistics.median(alone))
    print(
        f"alone {1e3 * statistics.median(alone):.0f} ms, beside {FLOOD} others {1e3 * max(beside):.0f} ms at worst; "
        f"one of them takes {1e3 * request_s:.0f} ms, {still_waiting:.0f} still waited"
    )
    assert still_waiting > TURNS, "the flood was still there"
    assert max(beside) < max(alone) + 2 * request_s + ALLOWANCE_S
