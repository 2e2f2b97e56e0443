"""A client beside a server that has little shared memory, as a program: its arguments are HOST:PORT and bytes.

Prints as JSON what it was told when it asked for more than there is, and what came of requests while all is taken.
"""

from __future__ import annotations

import json
import sys

import dqkv
from dqkv import errors
from dqkv.check import check
from dqkv.courier import Courier, Door
from dqkv.trials import TRIALS

MIB = 1 << 20
LEFT_NBYTES = 64 << 10
"""Less than the tensors of any problem here."""


def main() -> None:
    address, room_nbytes = sys.argv[1], int(sys.argv[2])
    with dqkv.Client(address) as client:
        told = {"too large": _told(client, room_nbytes + MIB)}
        with client.region(room_nbytes - LEFT_NBYTES, kind="posix"):
            told["no room left"] = _told(client, MIB)
            with Courier(Door(address=address)) as courier:
                verdicts = list(check(courier, TRIALS[:3]))
    outcomes = {f"{one.trial.name} by {one.transport}": [one.outcome, one.says] for one in verdicts}
    print(json.dumps({"told": told, "outcomes": outcomes}))


def _told(client: dqkv.Client, nbytes: int) -> str:
    try:
        with client.region(nbytes, kind="posix"):
            return ""
    except errors.RegionInvalid as error:
        return error.message


if __name__ == "__main__":
    main()
