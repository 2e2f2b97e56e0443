"""Callers: told apart by the strongest proof that they bring, and let in by right."""

from __future__ import annotations

import os

import pytest
from pydantic import SecretStr

from dqkv import errors
from dqkv.server.identity import RIGHTS, Call, Doorkeeper, Identity
from dqkv.settings import Right, Token
from dqkv.v1 import gradient_pb2 as pb

ALICE = Token(name="alice", right=Right.GRADIENT, secret=SecretStr("a-secret"))
BOB = Token(name="bob", right=Right.ADMIN, secret=SecretStr("b-secret"))
OTHER_UID = os.getuid() + 1
USER_SESSION = bytes(range(16))
OTHER_SESSION = bytes(range(16, 32))
BACKWARD = "/dqkv.v1.AttentionGradientService/Backward"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def door(*tokens: Token, certificates: bool = False) -> Doorkeeper:
    uids = {USER_SESSION: os.getuid(), OTHER_SESSION: OTHER_UID}
    return Doorkeeper(tokens=tokens, certificates=certificates, uid_of_session=uids.get)


def call(
    method: str = BACKWARD,
    *,
    peer: str = "ipv4:127.0.0.1:5000",
    token: str | None = None,
    session: str | None = None,
    names: tuple[str, ...] = (),
) -> Call:
    metadata = {}
    if token is not None:
        metadata["authorization"] = f"Bearer {token}"
    if session is not None:
        metadata["dqkv-session"] = session
    return Call(method=method, peer=peer, metadata=metadata, certificate_names=names)


def test_every_method_of_the_wire_has_a_right() -> None:
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            assert RIGHTS[f"/{service.full_name}/{method.name}"] is Right.GRADIENT


def test_without_proof_and_session_a_caller_owns_nothing() -> None:
    """Whoever binds its port tomorrow has the same address."""
    passing = door().identify(call())
    assert Right.GRADIENT in passing.rights
    with pytest.raises(errors.Unauthenticated, match="ask GetCapabilities for a session") as caught:
        _ = passing.owner
    assert caught.value.field == "dqkv-session"


def test_each_caller_without_a_session_gets_one_of_its_own_even_at_one_address() -> None:
    keeper = door()
    sessions = {keeper.session(keeper.identify(call())) for _ in range(100)}
    owners = {keeper.identify(call(session=session)).owner for session in sessions}
    assert len(sessions) == len(owners) == 100
    assert not [session for session in sessions if any(session in owner for owner in owners)], "names are logged"


def test_a_session_makes_every_connection_the_same_caller() -> None:
    keeper = door()
    session = keeper.session(keeper.identify(call()))
    first = keeper.identify(call(session=session))
    assert keeper.identify(call(peer="ipv4:127.0.0.1:5001", session=session)) == first
    assert keeper.session(first) == session


def test_a_session_lasts_however_many_callers_come() -> None:
    keeper = door()
    session = keeper.session(keeper.identify(call()))
    owner = keeper.identify(call(session=session)).owner
    for _ in range(10_000):
        keeper.session(keeper.identify(call()))
    assert keeper.identify(call(session=session)).owner == owner


@pytest.mark.parametrize("session", ["", "not hex", "é", "00", "00" * 16, "00" * 31, "00" * 33])
def test_what_is_no_session_owns_nothing(session: str) -> None:
    with pytest.raises(errors.Unauthenticated):
        _ = door().identify(call(session=session)).owner


def test_no_part_of_a_unix_users_session_can_be_changed() -> None:
    keeper = door()
    session = bytes.fromhex(keeper.session(keeper.identify(call(peer="unix:"))))
    assert keeper.identify(call(session=session.hex())).uid == os.getuid()
    for at in range(len(session)):
        forged = session[:at] + bytes([session[at] ^ 1]) + session[at + 1 :]
        assert keeper.identify(call(session=forged.hex())).uid is None
    assert door().identify(call(session=session.hex())).uid is None, "another server gave it"


@pytest.mark.parametrize("uid", [0, 1, 1000, 2**31, 2**32 - 2])
def test_a_session_says_whichever_unix_user_it_was_made_for(uid: int) -> None:
    keeper = door()
    session = keeper.session(Identity(name=f"uid:{uid}", rights=frozenset(), uid=uid))
    assert keeper.identify(call(session=session)).uid == uid


def test_a_session_whose_first_bytes_could_be_a_user_is_nobodys_without_the_servers_word() -> None:
    found = door().identify(call(session="00" * 32))
    assert found.uid is None
    assert found.name.startswith("session:")


def test_the_region_sockets_session_proves_a_unix_user() -> None:
    found = door().identify(call(session=USER_SESSION.hex()))
    assert (found.name, found.uid) == (f"uid:{os.getuid()}", os.getuid())


def test_a_unix_connection_is_its_owner() -> None:
    found = door(ALICE).identify(call(peer="unix:"))
    assert found.uid == os.getuid()
    assert Right.GRADIENT in found.rights


def test_a_unix_callers_session_makes_its_stream_the_same_caller() -> None:
    keeper = door(ALICE)
    found = keeper.identify(call(peer="unix:"))
    assert keeper.identify(call(session=keeper.session(found))).name == found.name


def test_a_certificate_comes_before_everything_else() -> None:
    keeper = door(ALICE, certificates=True)
    found = keeper.identify(call(names=("node-7", "spiffe://x"), token="a-secret", session=USER_SESSION.hex()))
    assert found.name == "cert:node-7"


def test_a_unix_user_comes_before_a_token_whose_rights_it_keeps() -> None:
    found = door(BOB).identify(call(token="b-secret", session=OTHER_SESSION.hex()))
    assert found.name == f"uid:{OTHER_UID}"
    assert Right.ADMIN in found.rights
    assert Right.ADMIN not in door(BOB).identify(call(session=OTHER_SESSION.hex())).rights


def test_a_token_names_its_caller() -> None:
    assert door(ALICE, BOB).identify(call(token="b-secret")).name == "token:bob"


@pytest.mark.parametrize(
    "header", ["Bearer wrong", "Bearer ", "Basic YTpi", "a-secret", "", "bearer a-secret-and-more"]
)
@pytest.mark.parametrize("tokens", [(), (ALICE,)], ids=["open", "guarded"])
def test_a_wrong_token_is_always_refused(header: str, tokens: tuple[Token, ...]) -> None:
    wrong = Call(method=BACKWARD, peer="p", metadata={"authorization": header})
    with pytest.raises(errors.Unauthenticated) as caught:
        door(*tokens).identify(wrong)
    assert "wrong" not in caught.value.message


@pytest.mark.parametrize("keeper", [door(ALICE), door(certificates=True)], ids=["tokens", "certificates"])
def test_without_proof_nobody_passes_a_guarded_door(keeper: Doorkeeper) -> None:
    with pytest.raises(errors.Unauthenticated):
        keeper.identify(call())
    with pytest.raises(errors.Unauthenticated):
        keeper.identify(call(session="00" * 16))


def test_a_session_alone_proves_no_token() -> None:
    keeper = door(ALICE)
    session = keeper.session(keeper.identify(call(token="a-secret")))
    with pytest.raises(errors.Unauthenticated):
        keeper.identify(call(session=session))


def test_certificate_names_prove_nothing_where_certificates_are_not_checked() -> None:
    assert door().identify(call(names=("node-7",))).name.startswith("peer:")


@pytest.mark.parametrize(
    ("method", "token", "allowed"),
    [
        (BACKWARD, "a-secret", True),
        (BACKWARD, "b-secret", True),
        (REFLECTION, "a-secret", False),
        (REFLECTION, "b-secret", True),
        ("/dqkv.v1.Unknown/Method", "a-secret", False),
    ],
)
def test_rights_are_held_against_the_method(method: str, token: str, allowed: bool) -> None:
    keeper = door(ALICE, BOB)
    if allowed:
        keeper.authorize(call(method, token=token))
    else:
        with pytest.raises(errors.RightMissing):
            keeper.authorize(call(method, token=token))


def test_an_open_door_lets_everyone_read_the_api() -> None:
    door().authorize(call(REFLECTION))
