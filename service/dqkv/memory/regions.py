"""Regions: memory of clients that this server holds open, each under a handle, a lease and its owner's name."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from dqkv import errors
from dqkv.location import InRegion
from dqkv.memory.block import Block, InBlock
from dqkv.memory.footprint import Footprint
from dqkv.memory.open_memory import Kind, OpenMemory
from dqkv.tensor import Tensor
from dqkv.wire import HANDLE_NBYTES

LABEL_LIMIT = 128
PROBE_LIMIT = 64
EXPIRED_LIMIT = 4096
"""Handles of expired regions that are remembered, so that their owner is told what happened."""


class Access(StrEnum):
    """What the server may do with a region."""

    READ_WRITE = "read_write"
    READ = "read"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionLimits:
    """How many regions there may be, of one owner and of all together, and how long a lease lasts in seconds."""

    regions_per_owner: int
    regions: int = 1024
    lease_default_s: float = 60.0
    lease_limit_s: float = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A region as its owner sees it: `lease_s` is what is left of its lease, `in_use` how many requests use it now."""

    handle: bytes
    label: str
    nbytes: int
    access: Access
    kind: Kind
    lease_s: float
    in_use: int


class RegionTable:
    """All regions of this server; belongs to the event loop. A stranger's handle answers as if it did not exist."""

    def __init__(
        self,
        *,
        limits: RegionLimits,
        block_ids: Iterator[int],
        on_close: Callable[[int], None],
        observe: Callable[[str, str], None],
        is_own: Callable[[int, int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_close(block_id) when a region's file is closed; observe(kind, event) counts.

        is_own(device, inode) tells memory that is this server's; clock gives seconds that only grow.
        """
        self._limits = limits
        self._block_ids = block_ids
        self._on_close = on_close
        self._observe = observe
        self._is_own = is_own
        self._clock = clock
        self._entries: dict[bytes, _Entry] = {}
        self._expired: OrderedDict[bytes, str] = OrderedDict()

    def register(
        self, owner: str, memory: OpenMemory, *, nbytes: int, access: Access, label: str, lease_s: float
    ) -> Region:
        """Registers the first nbytes of an open file; from here on the table closes it, also when it refuses it.

        lease_s is in seconds, 0 takes the default. Raises RegionInvalid for sizes, labels, leases or rights that
        cannot be, RegionNotOwned for memory of this server or of another owner's region, QuotaRegions.
        """
        try:
            self._check_terms(memory, nbytes=nbytes, access=access, label=label)
            lease_s = self._lease(lease_s) or self._limits.lease_default_s
            self._check_owner(owner, memory)
            self._check_quota(owner)
        except BaseException:
            memory.close()
            raise
        block = Block(
            block_id=next(self._block_ids),
            fd=memory.fd,
            nbytes=nbytes,
            sealed=memory.sealed,
            writable=access is Access.READ_WRITE,
        )
        handle = secrets.token_bytes(HANDLE_NBYTES)
        entry = _Entry(
            handle=handle, owner=owner, memory=memory, block=block, access=access, label=label, lease_s=lease_s
        )
        entry.lease_until = self._clock() + lease_s
        self._entries[handle] = entry
        self._observe(memory.kind, "register")
        return self._public(entry)

    def renew(self, owner: str, handle: bytes, lease_s: float) -> float:
        """Starts the lease again and returns its seconds; 0 takes what was registered.

        Raises RegionUnknown, RegionLeaseExpired, and RegionInvalid for a lease that cannot be.
        """
        entry = self._find(owner, handle, "handle")
        entry.lease_s = self._lease(lease_s) or entry.lease_s
        entry.lease_until = self._clock() + entry.lease_s
        self._observe(entry.memory.kind, "renew")
        return entry.lease_s

    def list(self, owner: str) -> list[Region]:
        """The owner's regions, in the order in which they were registered."""
        entries = (entry for entry in self._entries.values() if entry.owner == owner)
        return [self._public(entry) for entry in entries if not entry.released and not self._has_expired(entry)]

    async def release(self, owner: str, handle: bytes) -> None:
        """Ends a region: no request may use it from now on; returns when none does any more.

        Raises RegionUnknown and RegionLeaseExpired. A caller who stops waiting does not take the release back.
        """
        entry = self._entries.get(handle)
        if entry is None or entry.owner != owner or not entry.released:
            entry = self._find(owner, handle, "handle")
            entry.released = True
            self._observe(entry.memory.kind, "release")
            self._close_unused(entry)
        await entry.closed.wait()

    def probe(self, owner: str, handle: bytes, byte_offset: int, nbytes: int) -> bytes:
        """What lies in a region, 1 to 64 bytes, so that the client can tell that both see the same memory.

        Raises RegionUnknown, RegionLeaseExpired, RegionInvalid, RegionBounds, and RegionChanged for a file cut short.
        """
        entry = self._find(owner, handle, "handle")
        if not 1 <= nbytes <= PROBE_LIMIT:
            raise errors.RegionInvalid(f"nbytes is {nbytes}, must be 1 to {PROBE_LIMIT}", field="nbytes")
        if not 0 <= byte_offset <= entry.block.nbytes - nbytes:
            raise errors.RegionBounds(
                f"byte_offset {byte_offset} and {nbytes} bytes leave the region's {entry.block.nbytes}",
                field="byte_offset",
            )
        data = os.pread(entry.block.fd, nbytes, byte_offset)
        if len(data) != nbytes:
            self._observe(entry.memory.kind, "probe_fail")
            raise _changed("handle", entry.block.nbytes, byte_offset + len(data))
        return data

    def use(
        self, owner: str, *, reads: Mapping[str, Tensor[InRegion]], writes: Mapping[str, Tensor[InRegion]]
    ) -> RegionUse:
        """Holds regions for one request: the tensors it reads and those it writes, by role, of any shapes and strides.

        Renews their leases, which cannot run out before the use is released. Raises, naming the role: RegionUnknown,
        RegionLeaseExpired, RegionChanged for a file cut short, RegionBounds for a tensor that leaves its region,
        RegionInvalid for a write into a region that is for reading, RegionOverlap for an output whose elements share
        bytes with each other, an input or another output, and RegionBusy for bytes that a request in flight writes,
        or that this one writes and one in flight uses.
        """
        parts = [self._part(owner, role, tensor, writes=False) for role, tensor in reads.items()]
        parts += [self._part(owner, role, tensor, writes=True) for role, tensor in writes.items()]
        _check_overlap(parts)
        self._check_busy(parts)
        use = RegionUse(self, parts)
        for entry in use.entries:
            entry.uses.append(use)
        return use

    def end(self, use: RegionUse) -> None:
        """Takes a use back from its RegionUse; starts the leases again and closes what was only kept for it."""
        for entry in use.entries:
            entry.uses.remove(use)
            entry.lease_until = max(entry.lease_until, self._clock() + entry.lease_s)
            self._close_unused(entry)

    def expire(self) -> None:
        """Closes the regions whose leases ran out; to be called every second or so."""
        for entry in [entry for entry in self._entries.values() if self._has_expired(entry)]:
            self._expired[entry.handle] = entry.owner
            if len(self._expired) > EXPIRED_LIMIT:
                self._expired.popitem(last=False)
            entry.released = True
            self._observe(entry.memory.kind, "expire")
            self._close_unused(entry)

    def close(self) -> None:
        """Ends every region: closes those that no request uses, and the others when their requests end."""
        for entry in list(self._entries.values()):
            if not entry.released:
                entry.released = True
                self._observe(entry.memory.kind, "revoke")
            self._close_unused(entry)

    def totals(self) -> dict[Kind, tuple[int, int]]:
        """How many regions of each kind are open, and their bytes."""
        totals: dict[Kind, tuple[int, int]] = {"posix": (0, 0), "memfd": (0, 0)}
        for entry in self._entries.values():
            count, nbytes = totals[entry.memory.kind]
            totals[entry.memory.kind] = count + 1, nbytes + entry.block.nbytes
        return totals

    # ---- registering
    def _check_terms(self, memory: OpenMemory, *, nbytes: int, access: Access, label: str) -> None:
        if not 1 <= nbytes <= memory.nbytes:
            raise errors.RegionInvalid(
                f"nbytes is {nbytes}, must be 1 to the {memory.nbytes} bytes that the memory has", field="nbytes"
            )
        if len(label) > LABEL_LIMIT:
            raise errors.RegionInvalid(f"label has {len(label)} characters, the limit is {LABEL_LIMIT}", field="label")
        if access is Access.READ_WRITE and not memory.writable:
            raise errors.RegionInvalid("access is read and write, the memory allows reading alone", field="access")

    def _lease(self, lease_s: float) -> float:
        if not math.isfinite(lease_s) or not 0 <= lease_s <= self._limits.lease_limit_s:
            raise errors.RegionInvalid(
                f"lease_s is {lease_s}, must be 0 to {self._limits.lease_limit_s}", field="lease_s"
            )
        return lease_s

    def _check_owner(self, owner: str, memory: OpenMemory) -> None:
        if self._is_own(memory.device, memory.inode):
            raise errors.RegionNotOwned("the memory belongs to this server", field="memory")
        for entry in self._entries.values():
            if entry.inode == (memory.device, memory.inode) and entry.owner != owner:
                raise errors.RegionNotOwned("the memory is another caller's region", field="memory")

    def _check_quota(self, owner: str) -> None:
        count = sum(entry.owner == owner for entry in self._entries.values())
        if count >= self._limits.regions_per_owner:
            raise errors.QuotaRegions(
                f"this caller holds {count} regions, the limit is {self._limits.regions_per_owner}",
                retry_after_s=self._limits.lease_default_s,
            )
        if len(self._entries) >= self._limits.regions:
            raise errors.QuotaRegions(
                f"this server holds {len(self._entries)} regions, the limit is {self._limits.regions}",
                retry_after_s=self._limits.lease_default_s,
            )

    # ---- looking up
    def _find(self, owner: str, handle: bytes, name: str) -> _Entry:
        entry = self._entries.get(handle)
        if entry is not None and entry.owner == owner:
            if self._has_expired(entry):
                _refuse_expired(name)
            if not entry.released:
                return entry
        if self._expired.get(handle) == owner:
            _refuse_expired(name)
        raise errors.RegionUnknown(f"{name} names no region of this caller", field=name)

    def _has_expired(self, entry: _Entry) -> bool:
        return not entry.released and not entry.uses and entry.lease_until <= self._clock()

    def _public(self, entry: _Entry) -> Region:
        return Region(
            handle=entry.handle,
            label=entry.label,
            nbytes=entry.block.nbytes,
            access=entry.access,
            kind=entry.memory.kind,
            lease_s=max(entry.lease_until - self._clock(), 0.0),
            in_use=len(entry.uses),
        )

    def _close_unused(self, entry: _Entry) -> None:
        if entry.released and not entry.uses and self._entries.pop(entry.handle, None) is not None:
            entry.memory.close()
            self._on_close(entry.block.block_id)
            entry.closed.set()

    # ---- using
    def _part(self, owner: str, role: str, tensor: Tensor[InRegion], *, writes: bool) -> _Part:
        entry = self._find(owner, tensor.data.handle, role)
        offset, itemsize = tensor.data.byte_offset, tensor.dtype.itemsize
        if offset < 0 or offset % itemsize or offset + tensor.extent_nbytes > entry.block.nbytes:
            raise errors.RegionBounds(
                f"{role} takes bytes {offset} to {offset + tensor.extent_nbytes}, must start at a multiple of "
                f"{itemsize} and lie in the region's {entry.block.nbytes} bytes",
                field=role,
            )
        if writes and entry.access is Access.READ:
            raise errors.RegionInvalid(f"{role} lies in a region that is registered for reading", field=role)
        size = os.fstat(entry.block.fd).st_size
        if size < entry.block.nbytes:
            raise _changed(role, entry.block.nbytes, size)
        return _Part(role=role, tensor=tensor, entry=entry, footprint=Footprint.of(tensor, offset), writes=writes)

    def _check_busy(self, parts: Sequence[_Part]) -> None:
        # Two regions on one file are one memory.
        files = {part.entry.inode for part in parts}
        uses = {id(use): use for entry in self._entries.values() if entry.inode in files for use in entry.uses}
        for part in parts:
            for use in uses.values():
                if any(part.clashes(other) for other in use.parts):
                    raise errors.RegionBusy(
                        f"{part.role} shares bytes with a request in flight, and one of the two writes them",
                        field=part.role,
                    )


class RegionUse:
    """What one request uses of regions: `tensors` of all roles as a device is given them, in `blocks`."""

    def __init__(self, table: RegionTable, parts: Sequence[_Part]) -> None:
        self._table = table
        self._released = False
        self.parts = parts
        self.entries = list({part.entry.handle: part.entry for part in parts}.values())
        self.blocks: list[Block] = [entry.block for entry in self.entries]
        self.tensors: dict[str, Tensor[InBlock]] = {
            part.role: part.tensor.with_data(InBlock(part.entry.block.block_id, part.tensor.data.byte_offset))
            for part in parts
        }

    def release(self) -> None:
        """Ends the use; again does nothing."""
        if not self._released:
            self._released = True
            self._table.end(self)

    def __enter__(self) -> RegionUse:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()


@dataclass(eq=False, kw_only=True, slots=True)
class _Entry:
    """A region as the table knows it; `released` ones take no new use and are closed when `uses` is empty."""

    handle: bytes
    owner: str
    memory: OpenMemory
    block: Block
    access: Access
    label: str
    lease_s: float
    lease_until: float = 0.0
    released: bool = False
    uses: list[RegionUse] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def inode(self) -> tuple[int, int]:
        return self.memory.device, self.memory.inode


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One tensor of a use and the bytes of its file that it touches."""

    role: str
    tensor: Tensor[InRegion]
    entry: _Entry
    footprint: Footprint
    writes: bool

    def clashes(self, other: _Part) -> bool:
        """Whether the two share bytes that one of them writes."""
        if not (self.writes or other.writes) or self.entry.inode != other.entry.inode:
            return False
        return not self.footprint.is_disjoint(other.footprint)


def _check_overlap(parts: Sequence[_Part]) -> None:
    for index, part in enumerate(parts):
        if part.writes and not part.footprint.is_exclusive:
            raise errors.RegionOverlap(
                f"{part.role} has strides {part.tensor.strides} for shape {part.tensor.shape}: "
                "an output's elements must not share bytes",
                field=part.role,
            )
        for other in parts[:index]:
            if part.clashes(other):
                raise errors.RegionOverlap(f"{part.role} shares bytes with {other.role}", field=part.role)


def _refuse_expired(name: str) -> NoReturn:
    raise errors.RegionLeaseExpired(f"{name} names a region whose lease ran out; register it again", field=name)


def _changed(name: str, nbytes: int, size: int) -> errors.RegionChanged:
    return errors.RegionChanged(
        f"{name}: the region was registered with {nbytes} bytes, its memory ends after {size}", field=name
    )
