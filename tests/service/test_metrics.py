"""What is counted: every call once, under the code and reason that its caller was told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rig.caller import Caller, posix
from rig.memory import PosixMemory
from rig.process import wait_for
from rig.server import Running, running
from rig.wire import frames_of, header_of, sample, unary_request

from dqkv.v1 import gradient_pb2 as pb

ONE = sample()
Counters = dict[tuple[tuple[str, str], ...], float]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One of this module's own: who has regions of the common one renews them, and that is counted, too."""
    with running() as one:
        yield one


@pytest.fixture
def caller(server: Running) -> Iterator[Caller]:
    with Caller(server) as one:
        yield one


def counters(server: Running, name: str) -> Counters:
    """Every sample of a counter that is above 0, by its labels."""
    families = text_string_to_metric_families(server.http("/metrics")[1].decode())
    samples = (found for family in families for found in family.samples if found.name == name)
    return {tuple(sorted(found.labels.items())): found.value for found in samples if found.value}


def moved(before: Counters, after: Counters) -> Counters:
    return {labels: value - before.get(labels, 0) for labels, value in after.items() if value != before.get(labels, 0)}


# ---- one outcome of each kind
def answered(caller: Caller) -> None:
    caller.ask(caller.gradients.Backward, unary_request(ONE))


def answered_stream(caller: Caller) -> None:
    list(caller.stream(frames_of(ONE)))


def estimated(caller: Caller) -> None:
    caller.ask(caller.gradients.Estimate, pb.EstimateRequest(problem=unary_request(ONE).problem))


def misshapen(caller: Caller) -> None:
    request = unary_request(ONE)
    request.problem.tensors[1].shape[3] = 8
    request.problem.tensors[1].data = request.problem.tensors[1].data[: 16 * 2 * 8 * 4]
    caller.refused(caller.gradients.Backward, request)


def spoiled(caller: Caller) -> None:
    request = unary_request(ONE)
    request.checksum ^= 1
    caller.refused(caller.gradients.Backward, request)


def without_trailer(caller: Caller) -> None:
    caller.stream_refused(list(frames_of(ONE))[:-1])


def out_of_turn(caller: Caller) -> None:
    caller.stream_refused([header_of(ONE), header_of(ONE)])


def unknown_region(caller: Caller) -> None:
    caller.refused(caller.regions.ReleaseRegion, pb.ReleaseRegionRequest(handle=bytes(16)))


def registered(caller: Caller) -> None:
    with PosixMemory(4096) as memory:
        caller.register(memory)


def not_registered(caller: Caller) -> None:
    caller.refused(caller.regions.RegisterRegion, posix("/other", 1))


def cancelled(caller: Caller) -> None:
    hold = threading.Event()

    def frames() -> Iterator[Any]:
        yield from islice(frames_of(ONE), 2)
        hold.wait(600)

    call = caller.stream(frames())
    wait_for(lambda: caller.server.metric("dqkv_inflight_requests") == 1, "it has begun")
    call.cancel()
    hold.set()


OUTCOMES: dict[Callable[[Caller], None], dict[str, str]] = {
    answered: {"rpc": "Backward", "code": "OK", "reason": "", "arch": "cpu", "transport": "unary"},
    answered_stream: {"rpc": "BackwardStream", "code": "OK", "reason": "", "arch": "cpu", "transport": "stream"},
    estimated: {"rpc": "Estimate", "code": "OK", "reason": "", "arch": "cpu", "transport": ""},
    misshapen: {"rpc": "Backward", "code": "INVALID_ARGUMENT", "reason": "SHAPE_MISMATCH"},
    spoiled: {"rpc": "Backward", "code": "DATA_LOSS", "reason": "CHECKSUM_MISMATCH"},
    without_trailer: {"rpc": "BackwardStream", "code": "DATA_LOSS", "reason": "TRUNCATED"},
    out_of_turn: {"rpc": "BackwardStream", "code": "INVALID_ARGUMENT", "reason": "MESSAGE_INVALID"},
    # gRPC sometimes shows a cancelled upload as one that ended.
    cancelled: {"rpc": "BackwardStream", "transport": "stream", "arch": ""},
    unknown_region: {"rpc": "ReleaseRegion", "code": "NOT_FOUND", "reason": "REGION_UNKNOWN"},
    registered: {"rpc": "RegisterRegion", "code": "OK", "reason": ""},
    not_registered: {"rpc": "RegisterRegion", "code": "INVALID_ARGUMENT", "reason": "REGION_INVALID"},
}


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.__name__)
def test_each_outcome_moves_exactly_one_counter(
    server: Running, caller: Caller, outcome: Callable[[Caller], None]
) -> None:
    wait_for(server.is_quiet, "nothing else is going on")
    wanted = OUTCOMES[outcome]
    names = ("dqkv_requests_total", "grpc_server_handled_total", "dqkv_request_duration_seconds_count")
    before = {name: counters(server, name) for name in names}
    outcome(caller)
    wait_for(lambda: moved(before[names[0]], counters(server, names[0])), "it is counted")
    wait_for(server.is_quiet, "all of it is counted")
    for name in names:
        changes = moved(before[name], counters(server, name))
        assert list(changes.values()) == [1.0], changes
    request, handled = (dict(*moved(before[name], counters(server, name))) for name in names[:2])
    assert wanted.items() <= request.items()
    assert request["reason"] if request["code"] != "OK" else not request["reason"]
    assert handled["grpc_code"] == request["code"]
    assert handled["grpc_method"] == request["rpc"]
