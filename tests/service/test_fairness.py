"""One caller's flood and other callers' requests: turns are shared by predicted seconds, not by who came first."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

from rig.caller import Caller
from rig.process import children, paused, wait_for
from rig.server import Running
from rig.wire import assert_right, inline_gradients, sample, unary_request

ONE = sample(512, 1, 16)
"""Some milliseconds on one core, with gradients so few that they are answered as soon as they are there."""
FLOOD = 100
OTHERS = 5
FLOODER = "flooder"


def order_of_work(server: Running, flooder: Caller, others: list[Caller]) -> list[str]:
    """Whose requests were done, one after the other, when all of the flood had waited before any of the others came.

    The device stands still until every request waits, so that neither its speed nor this machine's decides anything.
    """
    queue = secrets.token_hex(4)
    names = [f"{queue} {FLOODER}"] * FLOOD + [f"{queue} {index}" for index in range(len(others))]
    calls = []
    with paused(*children(server.process.pid)):
        for count, (caller, name) in enumerate(zip([flooder] * FLOOD + others, names, strict=True), 1):
            request = unary_request(ONE)
            request.request_id = name
            calls.append(caller.gradients.Backward.future(request, timeout=600, metadata=caller.metadata))
            if count >= FLOOD:
                wait_for(lambda count=count: server.metric("dqkv_queue_depth") == count, f"{count} are on hand")
    for call in calls:
        assert_right(ONE, inline_gradients(ONE, call.result()))

    def done() -> list[str]:
        found = (event["request_id"] for event in server.events if event.get("event") == "request")
        return [name.partition(" ")[2] for name in found if name.startswith(queue)]

    wait_for(lambda: len(done()) == len(names), "each of them is in the log")
    return done()


def flood_before_others(order: list[str]) -> list[int]:
    """How many requests of the flood were done before each other one, in their order."""
    return [order[:place].count(FLOODER) for place, name in enumerate(order) if name != FLOODER]


def test_a_flood_of_one_caller_delays_anothers_request_by_two_requests_at_most(server: Running) -> None:
    """The one that runs already and one turn: a hundred that wait do not come before it."""
    with Caller(server) as flooder, ExitStack() as stack:
        others = [stack.enter_context(Caller(server)) for _ in range(OTHERS)]
        order = order_of_work(server, flooder, others)
    before = flood_before_others(order)
    print(f"done before the single requests, of {FLOOD} that came first: {before}")
    assert len(before) == OTHERS
    assert max(before) <= 2, before


def test_requests_of_a_caller_beside_a_flood_take_turns_with_it(server: Running) -> None:
    """However many it sends at once: each waits for one turn of the flood after the one before it."""
    with Caller(server) as flooder, Caller(server) as other:
        order = order_of_work(server, flooder, [other] * OTHERS)
    before = flood_before_others(order)
    print(f"done before the other's requests, of {FLOOD} that came first: {before}")
    assert len(before) == OTHERS
    assert all(count <= 2 + turn for turn, count in enumerate(before)), before
