"""Regions of a client: memory that it shares with the server, registered, probed, and kept alive while open."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from dqkv import errors
from dqkv.client.arrays import HostArray
from dqkv.client.connection import CONTROL_TIMEOUT_S, Connection
from dqkv.client.segment import Kind, Segment
from dqkv.location import InRegion
from dqkv.tensor import Tensor
from dqkv.v1 import gradient_pb2 as pb

if TYPE_CHECKING:
    import torch

NONCE_NBYTES = 32
RENEWALS_A_LEASE = 3
"""The heartbeat renews this often within a lease, so that one lost call does not end the region."""
GREETING = b"\x01"
TICKET_NBYTES = 16
SESSION_NBYTES = 16
ANSWER_NBYTES = 512
"""Room for a refusal in words; a ticket and a session are shorter."""
SOCKET_TIMEOUT_S = 10.0


class SharedMemory:
    """Memory that this process and the server see; arrays over it are sent by reference, whatever their strides.

    An array keeps its memory mapped for as long as it lives, also after the region was closed: then it is ordinary
    memory that the server no longer sees.
    """

    def __init__(self, segment: Segment, label: str) -> None:
        self.segment = segment
        self.label = label
        self.closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.segment.nbytes

    @property
    def kind(self) -> Kind:
        """What the memory is made of."""
        return self.segment.kind

    def tensor(
        self, shape: Sequence[int], dtype: Any, *, byte_offset: int = 0, strides: Sequence[int] | None = None
    ) -> HostArray:
        """A numpy array over the region; see Segment.tensor. Raises RegionInvalid when the region is closed."""
        return self._live().tensor(shape, dtype, byte_offset=byte_offset, strides=strides)

    def torch(
        self, shape: Sequence[int], dtype: Any, *, byte_offset: int = 0, strides: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A torch tensor on the CPU over the region; see Segment.tensor. Raises RegionInvalid when it is closed."""
        return self._live().torch(shape, dtype, byte_offset=byte_offset, strides=strides)

    def _live(self) -> Segment:
        if self.closed:
            raise errors.RegionInvalid(f"region {self.label!r} is closed", field="region")
        return self.segment


class AsyncRegion(SharedMemory):
    """A region of an AsyncClient."""

    def __init__(self, segment: Segment, label: str, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(segment, label)
        self._close = close

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


class Region(SharedMemory):
    """A region of a Client."""

    def __init__(self, segment: Segment, label: str, close: Callable[[], None]) -> None:
        super().__init__(segment, label)
        self._close = close

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
    """A segment that the server knows by `handle`, and the task that renews its lease."""

    segment: Segment
    handle: bytes
    heartbeat: asyncio.Task[None]


class RegionTable:
    """The open regions of one client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._open: list[Registration] = []
        self._registering = asyncio.Lock()

    async def register(self, nbytes: int, kind: Kind, label: str, lease_s: float) -> Registration:
        """Creates shared memory and registers it with the server.

        Raises RegionInvalid when the memory cannot be made, the server is on another machine, or it reads other
        memory than ours; QuotaRegions and what else the server refuses.
        """
        await self._connection.capabilities()
        segment = Segment(nbytes, kind)
        # One after the other: none may change whose the next calls are while another is on its way.
        async with self._registering:
            try:
                request = pb.RegisterRegionRequest(nbytes=nbytes, label=label, lease_s=lease_s)
                await self._name_memory(segment, request)
                answer = await self._call(self._connection.regions.RegisterRegion, request)
            finally:
                segment.hide()
            heartbeat = asyncio.create_task(self._keep(answer.handle, answer.lease_s / RENEWALS_A_LEASE))
            registration = Registration(segment=segment, handle=answer.handle, heartbeat=heartbeat)
            self._open.append(registration)
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
        if registration not in self._open:
            return
        self._open.remove(registration)
        registration.heartbeat.cancel()
        try:
            request = pb.ReleaseRegionRequest(handle=registration.handle)
            await self._call(self._connection.regions.ReleaseRegion, request)
        except (errors.RegionUnknown, errors.RegionLeaseExpired):
            return

    async def close(self) -> None:
        """Ends all regions; a server that cannot be reached ends them itself when their leases run out."""
        for registration in list(self._open):
            try:
                await self.release(registration)
            except errors.DqkvError:
                continue

    async def _name_memory(self, segment: Segment, request: pb.RegisterRegionRequest) -> None:
        if segment.kind is Kind.POSIX:
            request.posix.name = segment.name
            return
        path = (await self._connection.capabilities()).region_socket
        request.memfd.ticket, session = await asyncio.to_thread(_hand_over, path, segment.fd)
        if not self._open:
            # A user outlives its connections; regions that are open already belong to who we were until now.
            self._connection.adopt(session)

    async def _probe(self, registration: Registration) -> None:
        nonce = secrets.token_bytes(min(NONCE_NBYTES, registration.segment.nbytes))
        place = registration.segment.head(len(nonce))
        place[:] = np.frombuffer(nonce, np.uint8)
        request = pb.ProbeRegionRequest(handle=registration.handle, byte_offset=0, nbytes=len(nonce))
        answer = await self._call(self._connection.regions.ProbeRegion, request)
        place[:] = 0
        if answer.data != nonce:
            raise errors.RegionInvalid("the server reads other memory than this process wrote", field="region")

    async def _keep(self, handle: bytes, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self._call(self._connection.regions.RenewRegion, pb.RenewRegionRequest(handle=handle))
            except (errors.RegionUnknown, errors.RegionLeaseExpired):
                return
            except errors.DqkvError:
                continue

    async def _call(self, method: Any, request: Any) -> Any:
        return await self._connection.call(method, request, time.monotonic() + CONTROL_TIMEOUT_S)


def _hand_over(path: str, fd: int) -> tuple[bytes, str]:
    """Passes an open file to the server's region socket: the ticket it is registered by, and our session there."""
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
    if len(answer) != TICKET_NBYTES + SESSION_NBYTES:
        raise errors.RegionInvalid(answer.decode(errors="replace") or "the region socket hung up", field="kind")
    return answer[:TICKET_NBYTES], answer[TICKET_NBYTES:].hex()
