"""Whose turn it is: deficit round robin over owners, in predicted seconds of the device."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM_S = 1e-3
"""Credit an owner gets in a round; the smaller, the nearer to sharing the device second by second."""


class FairQueue(Generic[T]):
    """Items that wait, each of an owner and with the seconds it will take.

    Owners are visited in a ring, each gets the same credit in each round, and an owner's first item goes when its
    credit covers it (Shreedhar and Varghese, "Efficient Fair Queuing using Deficit Round Robin", 1996). Rounds in which
    nobody could go are counted, not walked. An owner whose items are gone keeps no credit and no debt.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line[T]] = {}

    def __len__(self) -> int:
        return sum(len(line.items) for line in self._lines.values())

    def push(self, owner: str, seconds: float, item: T) -> None:
        """Let an item wait behind the owner's others."""
        self._lines.setdefault(owner, _Line()).items.append((max(seconds, 0.0), item))

    def pop(self) -> T:
        """The item whose turn it is. Raises IndexError when none waits."""
        if not self._lines:
            raise IndexError("nothing waits")
        rounds = {owner: line.rounds_to_go() for owner, line in self._lines.items()}
        fewest = min(rounds.values())
        for line in self._lines.values():
            line.credit_s += fewest * QUANTUM_S
        # The first of the ring among those who may go; then it goes to the ring's end.
        owner = next(owner for owner in self._lines if rounds[owner] == fewest)
        line = self._lines.pop(owner)
        seconds, item = line.items.popleft()
        line.credit_s -= seconds
        if line.items:
            self._lines[owner] = line
        return item

    def remove(self, item: T) -> bool:
        """Take an item out, wherever it waits; False when it does not."""
        for owner, line in self._lines.items():
            for entry in line.items:
                if entry[1] is item:
                    line.items.remove(entry)
                    if not line.items:
                        del self._lines[owner]
                    return True
        return False

    def items(self) -> list[T]:
        """All that wait, by owner."""
        return [item for line in self._lines.values() for _, item in line.items]


@dataclass(slots=True)
class _Line(Generic[T]):
    """One owner's items, first come first served, and the seconds it has saved up."""

    items: deque[tuple[float, T]] = field(default_factory=deque)
    credit_s: float = 0.0

    def rounds_to_go(self) -> int:
        """Rounds until the credit covers the first item."""
        return max(math.ceil((self.items[0][0] - self.credit_s) / QUANTUM_S), 0)
