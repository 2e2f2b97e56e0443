"""The one tree of errors: each class has a stable reason and the gRPC and HTTP status it travels as.

A message says which field is wrong, its value and the limit, and so whose fault it is. The reason is the
contract (`google.rpc.ErrorInfo.reason`, metric label, log field); the message is for people and may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

ERROR_DOMAIN = "dqkv"
"""The `google.rpc.ErrorInfo.domain` of every error that this server makes itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """How a class of errors travels: gRPC code (name and number), HTTP status, and whether it may be sent again."""

    grpc_name: str
    grpc_code: int
    http: int
    retryable: bool = False


INVALID_ARGUMENT = Status(grpc_name="INVALID_ARGUMENT", grpc_code=3, http=400)
DEADLINE_EXCEEDED = Status(grpc_name="DEADLINE_EXCEEDED", grpc_code=4, http=504)
CANCELLED = Status(grpc_name="CANCELLED", grpc_code=1, http=499)
NOT_FOUND = Status(grpc_name="NOT_FOUND", grpc_code=5, http=404)
PERMISSION_DENIED = Status(grpc_name="PERMISSION_DENIED", grpc_code=7, http=403)
RESOURCE_EXHAUSTED = Status(grpc_name="RESOURCE_EXHAUSTED", grpc_code=8, http=429, retryable=True)
FAILED_PRECONDITION = Status(grpc_name="FAILED_PRECONDITION", grpc_code=9, http=412)
OUT_OF_RANGE = Status(grpc_name="OUT_OF_RANGE", grpc_code=11, http=400)
UNIMPLEMENTED = Status(grpc_name="UNIMPLEMENTED", grpc_code=12, http=501)
INTERNAL = Status(grpc_name="INTERNAL", grpc_code=13, http=500)
UNAVAILABLE = Status(grpc_name="UNAVAILABLE", grpc_code=14, http=503, retryable=True)
DATA_LOSS = Status(grpc_name="DATA_LOSS", grpc_code=15, http=400)
UNAUTHENTICATED = Status(grpc_name="UNAUTHENTICATED", grpc_code=16, http=401)


class DqkvError(Exception):
    """Root of the tree: `field` is what was wrong ("" where no field is), `retry_after_s` a hint in seconds or None."""

    status: ClassVar[Status] = INTERNAL
    reason: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str, *, field: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InternalFault(DqkvError):
    """The server's own fault; the request may be right."""

    reason = "INTERNAL_FAULT"


class TransportError(DqkvError):
    """No answer of the server came back: the connection failed, or something between broke it (client side)."""

    status = UNAVAILABLE
    reason = "TRANSPORT"


# ---- the request is wrong, and would be wrong on every server
class InvalidRequest(DqkvError):
    """The request itself is wrong; sending it again cannot help."""

    status = INVALID_ARGUMENT
    reason = "REQUEST_INVALID"


class ShapeMismatch(InvalidRequest):
    """A tensor's shape does not fit the other tensors."""

    reason = "SHAPE_MISMATCH"


class DTypeMismatch(InvalidRequest):
    """A tensor's dtype is not the one that the problem asks for."""

    reason = "DTYPE_MISMATCH"


class HeadsNotDivisible(InvalidRequest):
    """num_heads_q is no multiple of num_heads_kv, or one of them is zero."""

    reason = "HEADS_NOT_DIVISIBLE"


class HeadDimUnsupported(InvalidRequest):
    """head_dim or head_dim_v is no multiple of 8 between 8 and 256."""

    reason = "HEAD_DIM_UNSUPPORTED"


class OffsetsInvalid(InvalidRequest):
    """cu_seqlens do not start at 0, decrease, have the wrong count, or leave the tensor."""

    reason = "OFFSETS_INVALID"


class SequsedInvalid(InvalidRequest):
    """seqused is negative, has the wrong count, or counts more rows than are allocated."""

    reason = "SEQUSED_INVALID"


class MaxSeqlenTooSmall(InvalidRequest):
    """max_seqlen is smaller than the longest sequence."""

    reason = "MAX_SEQLEN_TOO_SMALL"


class OptionInvalid(InvalidRequest):
    """An option (softmax_scale, softcap, window, ...) has a value that means nothing."""

    reason = "OPTION_INVALID"


class OutOrDelta(InvalidRequest):
    """Both or neither of out and delta were given."""

    reason = "OUT_OR_DELTA"


class LseScopeInvalid(InvalidRequest):
    """lse_scope GLOBAL was asked for without the global softmax_lse."""

    reason = "LSE_SCOPE"


class ByteCountMismatch(InvalidRequest):
    """A tensor's bytes are more or fewer than its dtype and shape say."""

    reason = "BYTE_COUNT_MISMATCH"


class SizeOverflow(InvalidRequest):
    """A size or a product of sizes cannot be a tensor's."""

    reason = "SIZE_OVERFLOW"


class TooLarge(InvalidRequest):
    """The request could never fit this server, however idle it is."""

    reason = "TOO_LARGE"


class MessageInvalid(InvalidRequest):
    """A message breaks the protocol: unknown enum value, a tensor twice, a frame out of turn."""

    reason = "MESSAGE_INVALID"


class RegionInvalid(InvalidRequest):
    """A shared-memory region cannot be registered as described."""

    reason = "REGION_INVALID"


class RegionOverlap(InvalidRequest):
    """An output's bytes overlap an input's or another output's."""

    reason = "REGION_OVERLAP"


class RegionBounds(DqkvError):
    """A tensor's lowest or highest byte lies outside its region."""

    status = OUT_OF_RANGE
    reason = "REGION_BOUNDS"


class ArchUnavailable(DqkvError):
    """No device of this server runs the named arch, or the arch cannot run this problem."""

    status = UNIMPLEMENTED
    reason = "ARCH_UNAVAILABLE"


class MethodUnknown(DqkvError):
    """The server has no method of that name."""

    status = UNIMPLEMENTED
    reason = "METHOD_UNKNOWN"


class WrongPort(DqkvError):
    """Another port of this server serves the method; the message says which."""

    status = UNIMPLEMENTED
    reason = "WRONG_PORT"


# ---- compiled kernels
class ArtifactMissing(ArchUnavailable):
    """The kernel that a problem needs was not built; the message holds the command that builds it."""

    reason = "ARTIFACT_MISSING"


class ArtifactForeign(InternalFault):
    """What stands where a kernel should be is of other source, compiler or key, or is damaged."""

    reason = "ARTIFACT_FOREIGN"


class KernelBuilding(DqkvError):
    """A kernel that the problem needs is being built; nothing of the request ran, and it can be sent again."""

    status = UNAVAILABLE
    reason = "KERNEL_BUILDING"


class BuildFailed(InternalFault):
    """The compiler refused a kernel; the message names the key and ends with the compiler's own words."""

    reason = "BUILD_FAILED"


# ---- who asks
class Unauthenticated(DqkvError):
    """The caller did not prove an identity that this server knows."""

    status = UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class RightMissing(DqkvError):
    """The caller is known, but may not call this."""

    status = PERMISSION_DENIED
    reason = "RIGHT_MISSING"


# ---- regions
class RegionUnknown(DqkvError):
    """No region of this caller has that handle; a stranger's region answers the same."""

    status = NOT_FOUND
    reason = "REGION_UNKNOWN"


class RegionLeaseExpired(DqkvError):
    """The region's lease ran out before this use."""

    status = FAILED_PRECONDITION
    reason = "REGION_LEASE_EXPIRED"


class RegionChanged(DqkvError):
    """The memory behind the region is no longer as large as it was when it was registered."""

    status = FAILED_PRECONDITION
    reason = "REGION_CHANGED"


class RegionNotOwned(DqkvError):
    """The memory belongs to another caller, or to the server itself."""

    status = PERMISSION_DENIED
    reason = "REGION_NOT_OWNED"


class RegionBusy(DqkvError):
    """Another request in flight writes these bytes."""

    status = FAILED_PRECONDITION
    reason = "REGION_BUSY"


# ---- not now
class QueueFull(DqkvError):
    """The queue holds as much predicted work as this server takes on."""

    status = RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class QuotaBytes(DqkvError):
    """The staging memory for requests in flight is taken."""

    status = RESOURCE_EXHAUSTED
    reason = "QUOTA_BYTES"


class QuotaRegions(DqkvError):
    """This caller holds as many regions as one may."""

    status = RESOURCE_EXHAUSTED
    reason = "QUOTA_REGIONS"


class QuotaStreams(DqkvError):
    """This caller has as many streams open as one may."""

    status = RESOURCE_EXHAUSTED
    reason = "QUOTA_STREAMS"


class DeviceOutOfMemory(DqkvError):
    """The device ran out of memory while it worked on this request."""

    status = RESOURCE_EXHAUSTED
    reason = "DEVICE_OOM"


class WontFinish(DqkvError):
    """The predicted finish is past the request's deadline."""

    status = DEADLINE_EXCEEDED
    reason = "WONT_FINISH"


class Draining(DqkvError):
    """The server is shutting down; another one can take the request."""

    status = UNAVAILABLE
    reason = "DRAINING"


class DeviceLost(DqkvError):
    """The process that worked on this request died; it can be sent again."""

    status = UNAVAILABLE
    reason = "DEVICE_LOST"


class Cancelled(DqkvError):
    """The caller went away or cancelled."""

    status = CANCELLED
    reason = "CANCELLED"


# ---- bytes did not arrive as sent
class Truncated(DqkvError):
    """The stream ended before its trailer, or with fewer bytes than its header says."""

    status = DATA_LOSS
    reason = "TRUNCATED"


class ChecksumMismatch(DqkvError):
    """The bytes that arrived are not the bytes that were sent."""

    status = DATA_LOSS
    reason = "CHECKSUM_MISMATCH"


class StreamIdle(DqkvError):
    """No frame came for longer than the server waits."""

    status = CANCELLED
    reason = "STREAM_IDLE"


def _tree(root: type[DqkvError]) -> list[type[DqkvError]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


def table() -> dict[str, type[DqkvError]]:
    """Every reason with its class: the one table that server, client and documentation look errors up in."""
    return {kind.reason: kind for kind in _tree(DqkvError)}


def from_reason(reason: str, message: str, *, field: str = "", retry_after_s: float | None = None) -> DqkvError:
    """The typed error for a reason that came over a wire; a reason of a newer server becomes `DqkvError`."""
    return table().get(reason, DqkvError)(message, field=field, retry_after_s=retry_after_s)
