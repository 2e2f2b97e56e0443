"""A client that sends half of a stream and then waits to be killed: `python -m rig.upload HOST:PORT ROWS`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import grpc

from dqkv import framing

from . import wire

HALF_SENT = "half is on its way"


def main() -> None:
    one = wire.sample(int(sys.argv[2]))

    def frames() -> Iterator[framing.RequestFrame]:
        yield wire.header_of(one)
        for role in ("q", "k"):
            yield memoryview(one.inputs[role].tobytes())
        print(HALF_SENT, flush=True)
        threading.Event().wait()

    with grpc.insecure_channel(sys.argv[1]) as channel:
        for _ in wire.stream(channel, frames()):
            pass


if __name__ == "__main__":
    main()
