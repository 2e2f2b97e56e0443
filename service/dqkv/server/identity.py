"""Who calls and what they may do: a certificate's name, a unix user, a bearer token, or the connection itself."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dqkv import errors
from dqkv.settings import Right, Token
from dqkv.wire import SESSION_HEADER

SESSIONS_LIMIT = 4096
"""Sessions remembered; the one unused for longest is forgotten first."""

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
    """A caller: its name ("cert:...", "uid:...", "token:...", "peer:..."), which owns regions, and its rights.

    uid is the unix user where the caller proved one.
    """

    name: str
    rights: frozenset[Right]
    uid: int | None = None

    def require(self, right: Right) -> None:
        """Raises RightMissing when the caller lacks the right."""
        if right not in self.rights:
            raise errors.RightMissing(f"{self.name} lacks the right {right}", field="authorization")


class Doorkeeper:
    """Tells callers apart. Used by the loop and by bulk threads: what it changes, it changes in single steps."""

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
        self._sessions: OrderedDict[str, Identity] = OrderedDict()
        self._session_of: dict[str, str] = {}

    @property
    def takes_anyone(self) -> bool:
        """Whether a caller without any proof is let in."""
        return not self._tokens and not self._certificates

    def identify(self, call: Call) -> Identity:
        """The caller. Raises Unauthenticated for a wrong token, and without proof where proof is asked for."""
        token = self._token(call.metadata.get("authorization"))
        rights = _ALL if self.takes_anyone else frozenset() if token is None else _rights_of(token)
        session = call.metadata.get(SESSION_HEADER, "")
        if self._certificates and call.certificate_names:
            return Identity(name=f"cert:{call.certificate_names[0]}", rights=rights | _GRADIENT_ONLY)
        known = self._sessions.get(session)
        uid = self._uid(session, call.peer, known)
        if uid is not None:
            own = _ALL if uid in (0, os.getuid()) else _GRADIENT_ONLY
            return Identity(name=f"uid:{uid}", rights=rights | own, uid=uid)
        if token is not None:
            return Identity(name=f"token:{token.name}", rights=rights)
        if not self.takes_anyone:
            raise errors.Unauthenticated(
                "this server asks for a bearer token or a client certificate, none was given", field="authorization"
            )
        return Identity(name=f"peer:{call.peer}" if known is None else known.name, rights=rights)

    def authorize(self, call: Call) -> Identity:
        """The caller, if it may call the method. Raises Unauthenticated or RightMissing."""
        right = RIGHTS.get(call.method, Right.ADMIN)
        if right is None:
            return Identity(name=f"peer:{call.peer}", rights=frozenset())
        identity = self.identify(call)
        identity.require(right)
        return identity

    def session(self, identity: Identity) -> str:
        """The secret that makes calls on other connections this caller's; the same for the same caller."""
        known = self._session_of.get(identity.name)
        if known is not None:
            self._sessions.move_to_end(known)
            return known
        minted = secrets.token_hex(16)
        self._sessions[minted] = identity
        self._session_of[identity.name] = minted
        while len(self._sessions) > SESSIONS_LIMIT:
            _, forgotten = self._sessions.popitem(last=False)
            del self._session_of[forgotten.name]
        return minted

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

    def _uid(self, session: str, peer: str, known: Identity | None) -> int | None:
        if peer.startswith("unix:"):
            # The socket's file lets its owner in and nobody else.
            return os.getuid()
        if known is not None and known.uid is not None:
            return known.uid
        try:
            return self._uid_of_session(bytes.fromhex(session)) if session else None
        except ValueError:
            return None


def _rights_of(token: Token) -> frozenset[Right]:
    return _ALL if token.right is Right.ADMIN else _GRADIENT_ONLY


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
