"""Bearer tokens: what each method asks of its caller, and what a wrong secret gets."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import SecretStr
from rig.caller import Caller, refusal
from rig.memory import PosixMemory
from rig.process import wait_for
from rig.server import Running, running
from rig.wire import ALL_METHODS, header_of, sample

from dqkv import errors
from dqkv.server.identity import RIGHTS, Call, Doorkeeper
from dqkv.settings import Right, Token
from dqkv.v1 import gradient_pb2 as pb

SECRETS = {"none": None, "bad": "not-a-secret", "gradient": "gradient-secret", "admin": "admin-secret"}
UNARY = {
    f"/dqkv.v1.{service}/{name}": kind for service, methods in ALL_METHODS.items() for name, kind in methods.items()
}
STREAM = "/dqkv.v1.AttentionGradientService/BackwardStream"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/Check"
OPEN, LET_IN, NO_PROOF, NO_RIGHT = "OK", "let in", "UNAUTHENTICATED", "RIGHT_MISSING"

TABLE: dict[str, dict[str, str]] = {
    **{method: {"none": NO_PROOF, "bad": NO_PROOF, "gradient": LET_IN, "admin": LET_IN} for method in (*UNARY, STREAM)},
    HEALTH: {"none": OPEN, "bad": OPEN, "gradient": OPEN, "admin": OPEN},
    REFLECTION: {"none": NO_PROOF, "bad": NO_PROOF, "gradient": NO_RIGHT, "admin": OPEN},
}
"""Every method, and what a caller with each token gets; who is let in is answered, or refused for another reason."""


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    """A server with two tokens, without devices: what is let in is refused later, or answered at once."""
    with running(cpu_devices="0", tokens="trainer:gradient:gradient-secret,operator:admin:admin-secret") as server:
        yield server


def call(caller: Caller, method: str) -> Any:
    if method == STREAM:
        return list(caller.stream([header_of(sample())]))
    if method == HEALTH:
        return caller.ask(caller.health.Check, health_pb2.HealthCheckRequest())
    if method == REFLECTION:
        ask = reflection_pb2_grpc.ServerReflectionStub(caller.channel).ServerReflectionInfo
        questions = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        return list(ask(questions, timeout=120, metadata=caller.metadata))
    stub = caller.channel.unary_unary(method, request_serializer=UNARY[method].SerializeToString)
    return caller.ask(stub, UNARY[method]())


def outcome(caller: Caller, method: str) -> grpc.StatusCode:
    """gRPC's code of a call, whether it is answered or not."""
    try:
        call(caller, method)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("who", SECRETS)
@pytest.mark.parametrize("method", TABLE)
def test_each_method_lets_in_whom_it_should(guarded: Running, method: str, who: str) -> None:
    wanted = TABLE[method][who]
    with Caller(guarded, token=SECRETS[who]) as caller:
        if wanted == OPEN:
            assert call(caller, method)
            return
        if wanted == LET_IN:
            assert outcome(caller, method) not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            return
        refused = refusal(lambda: call(caller, method))
        assert refused.reason == wanted
        assert refused.field == "authorization"
        code = grpc.StatusCode.UNAUTHENTICATED if wanted == NO_PROOF else grpc.StatusCode.PERMISSION_DENIED
        assert refused.code is code


def test_the_table_has_every_method_that_the_server_knows() -> None:
    known = {method for method in RIGHTS if "/grpc.health" not in method}
    assert known == set(TABLE) - {HEALTH}


@pytest.mark.parametrize(
    ("method", "reason"),
    [(HEALTH, "WRONG_PORT"), ("/dqkv.v1.AttentionGradientService/Backward", NO_PROOF), ("/a.b/C", "METHOD_UNKNOWN")],
)
def test_who_has_no_token_learns_of_the_other_port_what_anyone_may_call_there(
    guarded: Running, method: str, reason: str
) -> None:
    with Caller(guarded) as caller:
        assert caller.refused(caller.bulk.unary_unary(method), b"").reason == reason


def test_an_unknown_method_tells_nobody_anything(guarded: Running) -> None:
    with Caller(guarded) as caller:
        stub = caller.channel.unary_unary("/dqkv.v1.AttentionGradientService/Forward")
        assert caller.refused(stub, b"").code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "gradient-secret", "Basic gradient-secret", "Bearer a b", ""])
def test_a_header_of_another_form_is_no_proof(guarded: Running, header: str) -> None:
    with Caller(guarded, metadata=[("authorization", header)]) as caller:
        refused = caller.refused(caller.facts.GetCapabilities, pb.GetCapabilitiesRequest())
        assert refused.code is grpc.StatusCode.UNAUTHENTICATED
        assert "secret" not in refused.message


def test_a_token_names_its_caller_on_every_connection(guarded: Running) -> None:
    with (
        Caller(guarded, token=SECRETS["gradient"]) as one,
        Caller(guarded, token=SECRETS["gradient"]) as same,
        Caller(guarded, token=SECRETS["admin"]) as other,
        PosixMemory(4096) as memory,
    ):
        handle = one.register(memory)
        assert [region.handle for region in same.list_regions()] == [handle]
        assert other.list_regions() == [], "an admin is a stranger, too"
        probed = other.refused(other.regions.ProbeRegion, pb.ProbeRegionRequest(handle=handle, nbytes=1))
        assert (probed.code, probed.reason) == (grpc.StatusCode.NOT_FOUND, "REGION_UNKNOWN")


def test_no_secret_is_ever_logged(guarded: Running) -> None:
    before = refusals(guarded)
    with Caller(guarded, token=SECRETS["bad"]) as caller:
        caller.refused(caller.facts.GetCapabilities, pb.GetCapabilitiesRequest())
    wait_for(lambda: refusals(guarded) > before, "it is in the log")
    log = "".join(guarded.lines)
    assert not [secret for secret in SECRETS.values() if secret is not None and secret in log]


def refusals(server: Running) -> int:
    """Lines of the log about callers who did not prove who they are."""
    return sum(event.get("reason") == NO_PROOF for event in server.events)


@pytest.mark.parametrize("secret", ["first", "last", "neither"])
def test_a_secret_is_compared_with_every_token_in_constant_time(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """Which token a guess is near to, or how near, changes neither how many comparisons there are nor their lengths."""
    compared: list[tuple[int, int]] = []
    honest = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return honest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    tokens = [Token(name=name, right=Right.GRADIENT, secret=SecretStr(name)) for name in ("first", "middle", "last")]
    door = Doorkeeper(tokens=tokens, certificates=False, uid_of_session=lambda _: None)
    asked = Call(method=STREAM, peer="ipv4:127.0.0.1:1", metadata={"authorization": f"Bearer {secret}"})
    if secret == "neither":
        with pytest.raises(errors.Unauthenticated):
            door.identify(asked)
    else:
        assert door.identify(asked).name == f"token:{secret}"
    assert compared == [(32, 32)] * 3
