"""Memory of a client that this server has opened, and what was found out about it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

Kind = Literal["posix", "memfd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenMemory:
    """An open file of a client: `nbytes` long when it was opened, `sealed` if that can never change.

    `writable` is what the client's file allows. (device, inode) tells whether two descriptors are the same memory.
    Whoever is given the value closes it.
    """

    fd: int
    nbytes: int
    sealed: bool
    writable: bool
    device: int
    inode: int
    kind: Kind

    def close(self) -> None:
        """Closes the file; the client's memory stays as it is."""
        os.close(self.fd)
