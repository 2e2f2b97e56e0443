"""What a failed connection most likely means: gRPC says what happened on the wire, not what was mistyped."""

from __future__ import annotations

from dataclasses import dataclass

from dqkv import errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """How a server was spoken to: with TLS or without, and whether it ever answered."""

    tls: bool
    answered: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sign:
    """Words of gRPC's that mean something to one who speaks with TLS (True), without (False), or either way (None)."""

    words: str
    tls: bool | None
    says: str


_SIGNS = (
    # An HTTP/1 server answers the preface of HTTP/2 with a status line.
    _Sign(words="Failed parsing HTTP/2", tls=None, says="this looks like the HTTP port: give the gRPC port"),
    # A server that expects a TLS greeting hangs up on any other.
    _Sign(words="Socket closed", tls=False, says="does the server want TLS?"),
    # Plain text came where a TLS greeting was due.
    _Sign(words="WRONG_VERSION_NUMBER", tls=True, says="no TLS is spoken there: leave tls out, or give another port"),
    _Sign(words="CERTIFICATE_VERIFY_FAILED", tls=True, says="do tls.root_ca and tls.server_name fit the server?"),
    _Sign(words="Deadline Exceeded", tls=None, says="nothing has answered there yet: is it the gRPC port, and TLS?"),
)  # fmt: skip


def hinted(error: errors.DqkvError, contact: Contact) -> errors.DqkvError:
    """The error, with a hint behind its message where no answer ever came and gRPC's words are a known sign."""
    if contact.answered or not isinstance(error, errors.TransportError | errors.WontFinish):
        return error
    for sign in _SIGNS:
        if sign.words in error.message and sign.tls in (None, contact.tls):
            return type(error)(f"{error.message} ({sign.says})", field=error.field, retry_after_s=error.retry_after_s)
    return error
