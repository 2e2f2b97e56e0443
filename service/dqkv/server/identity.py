"""Who calls and what they may do: a certificate's name, a unix user, a bearer token, or whoever holds a session."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dqkv import errors
from dqkv.settings import Right, Token
from dqkv.wire import SECRET_NBYTES, SESSION_HEADER

SESSION_NBYTES = 32
_UID_NBYTES = 8
_UIDS = 1 << 32
"""Unix users have numbers below this; of random sessions one in 2**32 begins with such a number."""

_GRADIENT = "/dqkv.v1.AttentionGradientService/"
_REGION = "/dqkv.v1.RegionService/"
RIGHTS: Mapping[str, Right | None] = {
    f"{_GRADIENT}Backward": Right.GRADIENT,
    f"{_GRADIENT}BackwardStream": Right.GRADIENT,
    f"{_GRADIENT}Estimate": Right.GRADIENT,
    f"{_REGION}RegisterRegion": Right.GRADIENT,
    f"{_REGION}RenewRegion": Right.GRADIENT,
    f"{_REGION}ListRegions": Right.GRADIENT,
    f"{_REGION}ReleaseRegion": Right.GRADIENT,
    f"{_REGION}ProbeRegion": Right.GRADIENT,
    "/dqkv.v1.CapabilityService/GetCapabilities": Right.GRADIENT,
    # Probes come from an orchestrator that holds no secret, and learn one bit.
    "/grpc.health.v1.Health/Check": None,
    "/grpc.health.v1.Health/Watch": None,
    "/grpc.health.v1.Health/List": None,
    # The API's description is for operators.
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Right.ADMIN,
}
"""What each method asks of its caller; None asks nothing, and a method that is not here asks for ADMIN."""

_ALL = frozenset(Right)
_GRADIENT_ONLY = frozenset({Right.GRADIENT})


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What a call says of its caller: the method, peer, metadata and the names of its certificate."""

    method: str
    peer: str
    metadata: Mapping[str, str]
    certificate_names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """A caller: its name ("cert:...", "uid:...", "token:...", "session:...", "peer:..."), and its rights.

    uid is the unix user where the caller proved one; session is the one that the call came with, if it is one.
    A "peer:..." proves nothing: its address is somebody else's tomorrow, so that its name owns nothing.
    """

    name: str
    rights: frozenset[Right]
    uid: int | None = None
    session: str = ""
    lasting: bool = True

    @property
    def owner(self) -> str:
        """The name that its regions are kept under. Raises Unauthenticated for a caller that can own none."""
        if not self.lasting:
            raise errors.Unauthenticated(
                f"regions belong to a caller that proves who it is: ask GetCapabilities for a session, "
                f"and send it as metadata {SESSION_HEADER}",
                field=SESSION_HEADER,
            )
        return self.name

    def require(self, right: Right) -> None:
        """Raises RightMissing when the caller lacks the right."""
        if right not in self.rights:
            raise errors.RightMissing(f"{self.name} lacks the right {right}", field="authorization")


class Doorkeeper:
    """Tells callers apart, by what each call brings alone: it remembers nobody, and any thread may ask it."""

    def __init__(
        self,
        *,
        tokens: Iterable[Token],
        certificates: bool,
        uid_of_session: Callable[[bytes], int | None],
    ) -> None:
        """certificates: callers' are checked; uid_of_session: the user behind a session of the region socket."""
        self._tokens = {_digest(token.secret.get_secret_value()): token for token in tokens}
        self._certificates = certificates
        self._uid_of_session = uid_of_session
        self._key = secrets.token_bytes(32)

    @property
    def takes_anyone(self) -> bool:
        """Whether a caller without any proof is let in."""
        return not self._tokens and not self._certificates

    def identify(self, call: Call) -> Identity:
        """The caller. Raises Unauthenticated for a wrong token, and without proof where proof is asked for."""
        token = self._token(call.metadata.get("authorization"))
        rights = _ALL if self.takes_anyone else frozenset() if token is None else _rights_of(token)
        session = _well_formed(call.metadata.get(SESSION_HEADER, ""))
        if self._certificates and call.certificate_names:
            name = f"cert:{call.certificate_names[0]}"
            return Identity(name=name, rights=rights | _GRADIENT_ONLY, session=session.hex())
        uid = self._uid(session, call.peer)
        if uid is not None:
            own = _ALL if uid in (0, os.getuid()) else _GRADIENT_ONLY
            return Identity(name=f"uid:{uid}", rights=rights | own, uid=uid)
        if token is not None:
            return Identity(name=f"token:{token.name}", rights=rights, session=session.hex())
        if not self.takes_anyone:
            raise errors.Unauthenticated(
                "this server asks for a bearer token or a client certificate, none was given", field="authorization"
            )
        if len(session) == SESSION_NBYTES:
            # Who knows the secret is the caller. The name is logged, and must not give the secret away.
            name = f"session:{hashlib.sha256(session).hexdigest()[:32]}"
            return Identity(name=name, rights=rights, session=session.hex())
        return passing(call.peer, rights)

    def authorize(self, call: Call) -> Identity:
        """The caller, if it may call the method. Raises Unauthenticated or RightMissing."""
        right = RIGHTS.get(call.method, Right.ADMIN)
        if right is None:
            return passing(call.peer)
        identity = self.identify(call)
        identity.require(right)
        return identity

    def session(self, identity: Identity) -> str:
        """The secret that makes calls on any connection this caller's: the one it sent, else a new one.

        A unix user's says who it is, so that its streams, which come by TCP, are its own; others' are random.
        """
        if identity.uid is not None:
            payload = identity.uid.to_bytes(_UID_NBYTES, "big")
            return (payload + self._mac(payload)).hex()
        return identity.session or secrets.token_hex(SESSION_NBYTES)

    def _token(self, header: str | None) -> Token | None:
        if header is None:
            return None
        scheme, _, secret = header.partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise errors.Unauthenticated("authorization is not of the form Bearer SECRET", field="authorization")
        digest, found = _digest(secret.strip()), None
        # Every token is compared, in constant time: how long it takes says nothing about which one was near.
        for known, token in self._tokens.items():
            if hmac.compare_digest(known, digest):
                found = token
        if found is None:
            raise errors.Unauthenticated("the bearer token is not known to this server", field="authorization")
        return found

    def _uid(self, session: bytes, peer: str) -> int | None:
        if peer.startswith("unix:"):
            # The socket's file lets its owner in and nobody else.
            return os.getuid()
        if not session:
            return None
        payload = session[:_UID_NBYTES]
        uid = int.from_bytes(payload, "big")
        # Most sessions are random, and name a user that there cannot be: their code is not computed.
        may_be_user = len(session) == SESSION_NBYTES and uid < _UIDS
        if may_be_user and hmac.compare_digest(self._mac(payload), session[_UID_NBYTES:]):
            return uid
        return self._uid_of_session(session)

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")[: SESSION_NBYTES - _UID_NBYTES]


def passing(peer: str, rights: frozenset[Right] = frozenset()) -> Identity:
    """A caller of whom only the address is known."""
    return Identity(name=f"peer:{peer}", rights=rights, lasting=False)


def _well_formed(session: str) -> bytes:
    """The bytes of a session of this server or of its region socket, empty for anything else."""
    try:
        raw = bytes.fromhex(session)
    except ValueError:
        return b""
    return raw if len(raw) in (SESSION_NBYTES, SECRET_NBYTES) else b""


def _rights_of(token: Token) -> frozenset[Right]:
    return _ALL if token.right is Right.ADMIN else _GRADIENT_ONLY


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
