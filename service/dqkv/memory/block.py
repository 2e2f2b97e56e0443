"""A block of memory that a device's process can reach: an open file and how it may be touched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """An open file of `nbytes` that holds tensors, known to every process of this server by `block_id`.

    `sealed` says that nobody can shrink the file, so it may be mapped; anything else is read and written by position
    (a mapping of a file that its owner shrinks ends the process that touches it). `writable` is the owner's leave.
    """

    block_id: int
    fd: int
    nbytes: int
    sealed: bool
    writable: bool


@dataclass(frozen=True, slots=True)
class InBlock:
    """Where a tensor is: which block, and the bytes from the block's start to its first element."""

    block_id: int
    byte_offset: int
