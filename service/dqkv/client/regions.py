"""Regions of a client: memory that it shares with the server, registered, probed, and kept alive while open."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from dqkv import errors
from dqkv.client.arrays import HostArray
from dqkv.client.connection import CONTROL_TIMEOUT_S, Connection
from dqkv.client.segment import Kind, Segment
from dqkv.client.waiting import Waiting
from dqkv.location import InRegion
from dqkv.tensor import Tensor
from dqkv.v1 import gradient_pb2 as pb
from dqkv.wire import GREETING, SECRET_NBYTES

if TYPE_CHECKING:
    import torch

Closed = TypeVar("Closed")

NONCE_NBYTES = 32
SETTLE_S = 15.0
"""Longest wait for the end of a request that was given up; a device that does not stop by then is ended itself."""
SETTLE_POLL_S = 0.01
RENEWALS_A_LEASE = 3
"""The heartbeat renews this often within a lease, so that one lost call does not end the region."""
ANSWER_NBYTES = 512
"""Room for a refusal in words; a ticket and a session are shorter."""
SOCKET_TIMEOUT_S = 10.0


class SharedMemory(Generic[Closed]):
    """Memory that this process and the server see; arrays over it are sent by reference, whatever their strides.

    `close` ends it at the server; what it returns is None, or awaited. An array keeps its memory mapped for as long as
    it lives, also after the region was closed: then it is ordinary memory that the server no longer sees.
    """

    def __init__(self, segment: Segment, label: str, close: Callable[[], Closed]) -> None:
        self.segment = segment
        self.label = label
        self.closed = False
        self._close = close

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.segment.nbytes

    @property
    def kind(self) -> Kind:
        """What the memory is made of."""
        return self.segment.kind

    def tensor(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        byte_offset: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> HostArray:
        """A numpy array over the region, behind those before it unless byte_offset says where; see Segment.tensor.

        Raises RegionInvalid when the region is closed or has no room left, RegionBounds, DTypeMismatch, ShapeMismatch,
        SizeOverflow.
        """
        return self._live().tensor(shape, dtype, byte_offset=byte_offset, strides=strides)

    def torch(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        byte_offset: int | None = None,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A torch tensor on the CPU over the region; places and errors are those of `tensor`."""
        return self._live().torch(shape, dtype, byte_offset=byte_offset, strides=strides)

    def _live(self) -> Segment:
        if self.closed:
            name = f"region {self.label!r}" if self.label else "this region"
            raise errors.RegionInvalid(f"{name} is closed", field="region")
        return self.segment


class AsyncRegion(SharedMemory[Coroutine[Any, Any, None]]):
    """A region of an AsyncClient."""

    async def close(self) -> None:
        """Ends the region at the server, once no request uses it any more. Twice is once."""
        self.closed = True
        await self._close()

    async def __aenter__(self) -> AsyncRegion:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class OpeningRegion:
    """A region that is still to be opened: `await` gives it, `async with` gives it and closes it; either, once."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncRegion]) -> None:
        self._opening = opening
        self._region: AsyncRegion | None = None

    def __await__(self) -> Generator[Any, None, AsyncRegion]:
        return self._opening.__await__()

    async def __aenter__(self) -> AsyncRegion:
        self._region = await self
        return self._region

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._region is not None:
            await self._region.close()


class Region(SharedMemory[None]):
    """A region of a Client."""

    def close(self) -> None:
        """Ends the region at the server, once no request uses it any more. Twice is once."""
        self.closed = True
        self._close()

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class Registration:
    """A segment that the server knows by `handle`, for `lease_s` seconds after its last use or renewal."""

    segment: Segment
    handle: bytes
    lease_s: float


class RegionTable:
    """The open regions of one client; any thread may use it."""

    def __init__(self, connection: Connection, waiting: Waiting) -> None:
        self._connection = connection
        self._waiting = waiting
        self._changing = threading.Lock()
        self._open: tuple[Registration, ...] = ()
        self._heart: threading.Thread | None = None
        self._changed = threading.Event()
        self._closed = False

    async def register(self, nbytes: int, kind: Kind, label: str, lease_s: float) -> Registration:
        """Creates shared memory and registers it with the server.

        Raises RegionInvalid when the memory cannot be made, the server is on another machine, or it reads other
        memory than ours; QuotaRegions and what else the server refuses.
        """
        path = (await self._connection.capabilities()).region_socket
        segment = Segment(nbytes, kind)
        try:
            request = pb.RegisterRegionRequest(nbytes=nbytes, label=label, lease_s=lease_s)
            if kind is Kind.MEMFD:
                request.memfd.ticket = await self._waiting.work(lambda: _hand_over(path, segment.fd), _nothing)
            else:
                request.posix.name = segment.name
            answer = await self._call(self._connection.regions.RegisterRegion, request)
        finally:
            segment.hide()
        registration = Registration(segment=segment, handle=answer.handle, lease_s=answer.lease_s)
        self._add(registration)
        try:
            await self._probe(registration)
        except BaseException:
            await self.release(registration)
            raise
        return registration

    def find(self, array: HostArray) -> Tensor[InRegion] | None:
        """The array as a reference into the open region that it lies in; None when it lies in none."""
        found = (item.segment.find(array, item.handle) for item in self._open)
        return next((tensor for tensor in found if tensor is not None), None)

    async def release(self, registration: Registration) -> None:
        """Ends the region at the server; one that the server has forgotten already is ended."""
        with self._changing:
            if registration not in self._open:
                return
            self._open = tuple(item for item in self._open if item is not registration)
        try:
            request = pb.ReleaseRegionRequest(handle=registration.handle)
            await self._call(self._connection.regions.ReleaseRegion, request)
        except (errors.RegionUnknown, errors.RegionLeaseExpired):
            return

    async def forget_lost(self, handles: Collection[bytes]) -> frozenset[bytes]:
        """Takes those of the regions that the server no longer knows off the table, and returns them."""
        answer = await self._call(self._connection.regions.ListRegions, pb.ListRegionsRequest())
        known = {region.handle for region in answer.regions}
        with self._changing:
            lost = frozenset(handles) - known
            if lost:
                # It is another server than the one that said where its region socket is.
                self._connection.forget()
            self._open = tuple(item for item in self._open if item.handle not in lost)
        return lost

    async def until_unused(self, handles: Collection[bytes]) -> None:
        """Waits until no request uses these regions any more, or the server cannot be asked; SETTLE_S at most."""
        deadline = time.monotonic() + SETTLE_S
        with suppress(errors.DqkvError):
            while not self._closed and time.monotonic() < deadline:
                answer = await self._call(self._connection.regions.ListRegions, pb.ListRegionsRequest())
                if not any(region.in_use for region in answer.regions if region.handle in handles):
                    return
                await self._waiting.sleep(SETTLE_POLL_S)

    async def close(self) -> None:
        """Ends all regions; a server that cannot be reached ends them itself when their leases run out."""
        for registration in self._open:
            try:
                await self.release(registration)
            except errors.DqkvError:
                continue
        self._closed = True
        self._changed.set()

    def _add(self, registration: Registration) -> None:
        with self._changing:
            self._open = (*self._open, registration)
            if self._heart is None:
                self._heart = threading.Thread(target=self._beat, name="dqkv-regions", daemon=True)
                self._heart.start()
        self._changed.set()

    def _beat(self) -> None:
        """Renews every lease well before its end; a region that the server has ended says so at its next use."""
        while not self._closed:
            interval_s = min((item.lease_s for item in self._open), default=None)
            self._changed.wait(None if interval_s is None else interval_s / RENEWALS_A_LEASE)
            self._changed.clear()
            for item in self._open:
                with suppress(errors.DqkvError):
                    request = pb.RenewRegionRequest(handle=item.handle)
                    self._connection.call_here(self._connection.regions.RenewRegion, request, CONTROL_TIMEOUT_S)

    async def _probe(self, registration: Registration) -> None:
        nonce = secrets.token_bytes(min(NONCE_NBYTES, registration.segment.nbytes))
        place = registration.segment.head(len(nonce))
        place[:] = np.frombuffer(nonce, np.uint8)
        request = pb.ProbeRegionRequest(handle=registration.handle, byte_offset=0, nbytes=len(nonce))
        answer = await self._call(self._connection.regions.ProbeRegion, request)
        place[:] = 0
        if answer.data != nonce:
            raise errors.RegionInvalid("the server reads other memory than this process wrote", field="region")

    async def _call(self, method: Any, request: Any) -> Any:
        return await self._connection.call(method, request, time.monotonic() + CONTROL_TIMEOUT_S)


def _nothing() -> None:
    """Ends nothing: the exchange with the region socket has a short time of its own."""


def _hand_over(path: str, fd: int) -> bytes:
    """Passes an open file to the server's region socket; returns the ticket that it is registered by."""
    if not path:
        raise errors.RegionInvalid("this server has no region socket: use kind posix", field="kind")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(SOCKET_TIMEOUT_S)
            door.connect(path)
            socket.send_fds(door, [GREETING], [fd])
            answer = door.recv(ANSWER_NBYTES)
    except OSError as error:
        raise errors.RegionInvalid(
            f"the server's region socket cannot be reached from here: {error.strerror or error}", field="kind"
        ) from None
    if len(answer) != 2 * SECRET_NBYTES:
        raise errors.RegionInvalid(answer.decode(errors="replace") or "the region socket hung up", field="kind")
    # The session that comes with it would make us the unix user instead of who we are on our connection.
    return answer[:SECRET_NBYTES]
