"""RegionService of the asyncio server: memory that client and server share, each caller's own."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import grpc
from google.protobuf.message import Message

from dqkv import errors
from dqkv.memory.mailbox import FdMailbox
from dqkv.memory.open_memory import OpenMemory
from dqkv.memory.posix import open_posix
from dqkv.memory.regions import Access, Region, RegionTable
from dqkv.server.gate import Gate, Method, Visit, unary
from dqkv.v1 import gradient_pb2 as pb

SERVICE = "dqkv.v1.RegionService"

_ACCESS = {pb.REGION_ACCESS_UNSPECIFIED: Access.READ_WRITE, pb.REGION_ACCESS_READ: Access.READ}
_ACCESS_NUMBERS = {access: number for number, access in _ACCESS.items()}


class RegionServicer:
    """RegionService; every region belongs to the caller that registered it."""

    def __init__(self, *, gate: Gate, table: RegionTable, mailbox: FdMailbox | None) -> None:
        """mailbox: where memfds arrive, None when there is no region socket."""
        self._gate = gate
        self._table = table
        self._mailbox = mailbox

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's methods for an asyncio server."""
        methods: dict[str, tuple[Callable[..., Awaitable[Message]], type[Message]]] = {
            "RegisterRegion": (self.register, pb.RegisterRegionRequest),
            "RenewRegion": (self.renew, pb.RenewRegionRequest),
            "ListRegions": (self.list, pb.ListRegionsRequest),
            "ReleaseRegion": (self.release, pb.ReleaseRegionRequest),
            "ProbeRegion": (self.probe, pb.ProbeRegionRequest),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: unary(self._gate, Method(service=SERVICE, name=name), behaviour, request_type)
                for name, (behaviour, request_type) in methods.items()
            },
        )

    async def register(self, request: pb.RegisterRegionRequest, visit: Visit) -> pb.RegisterRegionResponse:
        """Opens the memory and registers it. Raises RegionInvalid, RegionNotOwned and QuotaRegions."""
        access = _ACCESS.get(request.access)
        if access is None:
            raise errors.RegionInvalid(f"access is {request.access}, which this server does not know", field="access")
        memory = self._open(request, visit)
        region = self._table.register(
            visit.caller.name,
            memory,
            nbytes=request.nbytes,
            access=access,
            label=request.label,
            lease_s=request.lease_s,
        )
        visit.facts |= {"kind": memory.kind, "nbytes": request.nbytes}
        return pb.RegisterRegionResponse(handle=region.handle, lease_s=region.lease_s)

    async def renew(self, request: pb.RenewRegionRequest, visit: Visit) -> pb.RenewRegionResponse:
        """Renews the lease. Raises RegionUnknown, RegionLeaseExpired and RegionInvalid."""
        return pb.RenewRegionResponse(lease_s=self._table.renew(visit.caller.name, request.handle, request.lease_s))

    async def list(self, _: pb.ListRegionsRequest, visit: Visit) -> pb.ListRegionsResponse:
        """The caller's regions."""
        return pb.ListRegionsResponse(regions=[_encode(region) for region in self._table.list(visit.caller.name)])

    async def release(self, request: pb.ReleaseRegionRequest, visit: Visit) -> pb.ReleaseRegionResponse:
        """Ends a region, and returns when no request uses it any more. Raises RegionUnknown."""
        await self._table.release(visit.caller.name, request.handle)
        return pb.ReleaseRegionResponse()

    async def probe(self, request: pb.ProbeRegionRequest, visit: Visit) -> pb.ProbeRegionResponse:
        """A few bytes of a region as the server sees them. Raises RegionUnknown, RegionBounds and RegionChanged."""
        data = self._table.probe(visit.caller.name, request.handle, request.byte_offset, request.nbytes)
        return pb.ProbeRegionResponse(data=data)

    def _open(self, request: pb.RegisterRegionRequest, visit: Visit) -> OpenMemory:
        match request.WhichOneof("memory"):
            case "posix":
                uid = os.getuid() if visit.caller.uid is None else visit.caller.uid
                return open_posix(request.posix.name, uid=uid)
            case "memfd":
                if self._mailbox is None:
                    raise errors.RegionInvalid("this server has no region socket for memfds", field="memfd")
                return self._mailbox.take(request.memfd.ticket, visit.caller.name)
            case _:
                raise errors.RegionInvalid("memory was not given", field="memory")


def _encode(region: Region) -> pb.Region:
    return pb.Region(
        handle=region.handle,
        label=region.label,
        nbytes=region.nbytes,
        access=_ACCESS_NUMBERS[region.access],
        lease_s=region.lease_s,
        in_use=region.in_use,
    )
