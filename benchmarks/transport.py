"""What moving tensors costs: streams against raw grpcio, a control call against an empty one, regions against memcpy.

    python benchmarks/transport.py [--quick]

Both sides of every pair run interleaved in this process against servers of their own on loopback, and the ratio is
the median over the rounds of each pair's own ratio. The server's compute is taken out of the streams' times by the
report that comes with each answer, and is next to nothing anyway: every sequence is declared unused (seqused 0), so
the gradients are zeros. Results go to benchmarks/results/transport.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
import ml_dtypes
import numpy as np
from machine import write_result
from rich.console import Console
from rich.table import Table

import dqkv
from dqkv.cli.own_server import OwnServer
from dqkv.tensor import DType, Tensor

CHUNK = 1 << 20
MESSAGE_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
HEADS, HEAD_DIM = 16, 128
INPUTS = ("q", "k", "v", "dout")
GRADIENTS = ("dq", "dk", "dv")
STATISTICS = ("delta", "softmax_lse")
STATISTICS_NBYTES = HEADS * DType.FP32.itemsize
ROW_NBYTES = HEADS * HEAD_DIM * DType.BF16.itemsize


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is moved in one call, and how often everything is repeated."""

    rows: int
    rounds: int

    @property
    def up_nbytes(self) -> int:
        """Bytes of q, k, v, dout, delta and softmax_lse."""
        return self.rows * (4 * ROW_NBYTES + 2 * STATISTICS_NBYTES)

    @property
    def down_nbytes(self) -> int:
        """Bytes of dq, dk and dv."""
        return 3 * self.rows * ROW_NBYTES


# ---- the peer: grpcio with nothing around it
def serve_raw(nbytes: int) -> None:
    """A synchronous grpcio server: uploads land in a preallocated buffer, downloads come out of it."""
    memory = memoryview(bytearray(nbytes))

    def upload(chunks: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        at = 0
        for chunk in chunks:
            memory[at : at + len(chunk)] = chunk
            at += len(chunk)
        return b""

    def download(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        for at in range(0, int.from_bytes(request, "little"), CHUNK):
            yield bytes(memory[at : at + CHUNK])

    def empty(_request: bytes, _: grpc.ServicerContext) -> bytes:
        return b""

    handlers = {
        "upload": grpc.stream_unary_rpc_method_handler(upload),
        "download": grpc.unary_stream_rpc_method_handler(download),
        "empty": grpc.unary_unary_rpc_method_handler(empty),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4), options=MESSAGE_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()


class Raw:
    """A client of `serve_raw`."""

    def __init__(self, port: int, size: Size) -> None:
        self._down_nbytes = size.down_nbytes
        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=MESSAGE_OPTIONS)
        self._upload = channel.stream_unary("/raw/upload")
        self._download = channel.unary_stream("/raw/download")
        self._empty = channel.unary_unary("/raw/empty")

    def upload(self, source: memoryview) -> None:
        """Sends `source` in chunks of 1 MiB."""
        self._upload(bytes(source[at : at + CHUNK]) for at in range(0, source.nbytes, CHUNK))

    def download(self, target: memoryview) -> None:
        """Fills `target` from chunks of 1 MiB."""
        at = 0
        for chunk in self._download(self._down_nbytes.to_bytes(8, "little")):
            target[at : at + len(chunk)] = chunk
            at += len(chunk)

    def empty(self) -> None:
        """A call without content."""
        self._empty(b"")


# ---- ours
class Ours:
    """A client of the server under test, and a problem of a given size that has nothing to compute."""

    def __init__(self, client: dqkv.Client, size: Size, kind: str) -> None:
        self._client = client
        shape = (1, size.rows, HEADS, HEAD_DIM)
        bits = np.random.default_rng(0).integers(0, 2**15, size=shape, dtype=np.uint16)
        self._inputs = {role: bits.view(ml_dtypes.bfloat16).copy() for role in INPUTS}
        self._inputs |= {role: np.zeros((1, HEADS, size.rows), np.float32) for role in STATISTICS}
        self._gradients = {role: np.ones(shape, ml_dtypes.bfloat16) for role in GRADIENTS}
        arrays = self._inputs | self._gradients
        self._region = client.region(size.up_nbytes + size.down_nbytes, kind=kind)
        self._shared = {role: self._region.tensor(array.shape, array.dtype) for role, array in arrays.items()}
        for role, array in arrays.items():
            self._shared[role][...] = array

    def upload(self) -> float:
        """Streams the inputs up and has the gradients written to the region. Seconds without the device's."""
        return self._timed(self._inputs, self._region_gradients())

    def download(self) -> float:
        """Has the inputs read from the region and streams the gradients down. Seconds without the device's."""
        return self._timed(self._region_inputs(), self._gradients)

    def by_region(self) -> float:
        """Moves everything by region. Seconds without the device's."""
        return self._timed(self._region_inputs(), self._region_gradients())

    def close(self) -> None:
        """Gives the region back."""
        self._shared.clear()
        self._region.close()

    def _region_inputs(self) -> dict[str, Any]:
        return {role: self._shared[role] for role in self._inputs}

    def _region_gradients(self) -> dict[str, Any]:
        return {role: self._shared[role] for role in GRADIENTS}

    def _timed(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> float:
        began = time.perf_counter()
        answer = self._client.backward(**inputs, **outputs, seqused_q=[0], seqused_k=[0])
        return time.perf_counter() - began - answer.report.device_s


# ---- the questions
def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> dict[str, Any]:
    """Interleaved pairs in seconds, each first by turns; the ratio is peer over ours, above 1 where ours is faster."""
    pairs = []
    for index in range(rounds + 1):
        first_is_ours = index % 2 == 0
        first = (ours if first_is_ours else peer)()
        second = (peer if first_is_ours else ours)()
        pairs.append((first, second) if first_is_ours else (second, first))
    pairs = pairs[1:]
    ratios = sorted(peer_s / ours_s for ours_s, peer_s in pairs)
    return {
        "ratio": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
        "ours_s": statistics.median(ours_s for ours_s, _ in pairs),
        "peer_s": statistics.median(peer_s for _, peer_s in pairs),
    }


def streams(client: dqkv.Client, raw: Raw, size: Size) -> dict[str, Any]:
    """Upload and download by BackwardStream against raw grpcio streams of the same bytes."""
    ours = Ours(client, size, "memfd")
    source, target = memoryview(np.random.default_rng(1).bytes(size.up_nbytes)), memoryview(bytearray(size.down_nbytes))
    rows = {
        "upload": compare(ours.upload, lambda: seconds(lambda: raw.upload(source)), size.rounds),
        "download": compare(ours.download, lambda: seconds(lambda: raw.download(target)), size.rounds),
    }
    ours.close()
    rows["upload"]["nbytes"], rows["download"]["nbytes"] = size.up_nbytes, size.down_nbytes
    return rows


def control(client: dqkv.Client, raw: Raw, calls: int) -> dict[str, Any]:
    """Control calls of the blocking client against an empty grpcio call; here the ratio is ours over the peer's."""
    rows = {}
    problem = dqkv.Problem(**{role: Tensor.dense(DType.BF16, (1, 64, 8, 64), None) for role in (*INPUTS, "out")})
    asked = {
        "health": client.health,
        "capabilities": client.capabilities,
        "estimate": lambda: client.estimate(problem),
    }
    for name, ask in asked.items():
        row = compare(lambda ask=ask: seconds(ask), lambda: seconds(raw.empty), calls)
        quartiles = [1 / value for value in reversed(row["quartiles"])]
        rows[f"control_{name}"] = {**row, "ratio": 1 / row["ratio"], "quartiles": quartiles}
    return rows


def regions(client: dqkv.Client, http: str, size: Size) -> dict[str, Any]:
    """The region path against memcpy of the same bytes, and the tensor bytes that it moved over gRPC."""
    nbytes = size.up_nbytes + size.down_nbytes
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    rows = {}
    for kind in ("memfd", "posix"):
        before = tensor_bytes_over_grpc(http)
        ours = Ours(client, size, kind)
        row = compare(ours.by_region, lambda: seconds(lambda: np.copyto(target, source)), size.rounds)
        ours.close()
        moved = tensor_bytes_over_grpc(http) - before
        rows[f"region_{kind}"] = {
            **row,
            "nbytes": nbytes,
            "grpc_nbytes": moved,
        }
    return rows


def tensor_bytes_over_grpc(http: str) -> int:
    """Tensor bytes that came and went by message or stream so far, as the server counts them."""
    with urllib.request.urlopen(f"http://{http}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    rows = [line for line in lines if line.startswith("dqkv_bytes_total{") and 'transport="region"' not in line]
    return int(sum(float(line.rpartition(" ")[2]) for line in rows))


LIMITS = {
    "upload": ("at least", 0.9),
    "download": ("at least", 0.9),
    "control_health": ("at most", 1.5),
    "control_capabilities": ("at most", 1.5),
    "control_estimate": ("at most", 1.5),
    "region_memfd": ("at least", 0.5),
    "region_posix": ("at least", 0.5),
}


def show(rows: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table("what", "ours", "peer", "ratio", "quartiles", "wanted", "tensor bytes over gRPC")
    for name, row in rows.items():
        unit = [
            f"{row['nbytes'] / row[side] / 1e9:.2f} GB/s" if "nbytes" in row else f"{row[side] * 1e6:.0f} us"
            for side in ("ours_s", "peer_s")
        ]
        low, high = row["quartiles"]
        grpc_nbytes = str(row.get("grpc_nbytes", ""))
        words, limit = LIMITS[name]
        table.add_row(name, *unit, f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}", f"{words} {limit}", grpc_nbytes)
    Console().print(table)


def main() -> None:
    """Runs everything and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller and fewer; writes no result")
    parser.add_argument("--raw", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.raw:
        serve_raw(options.raw)
        return
    size = Size(rows=4096, rounds=3) if options.quick else Size(rows=32768, rounds=11)
    peer = subprocess.Popen(
        [sys.executable, __file__, "--raw", str(size.down_nbytes + size.up_nbytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        raw = Raw(int(peer.stdout.readline()), size)
        with OwnServer() as at, dqkv.Client(at.grpc) as client:
            rows = {
                **streams(client, raw, size),
                **control(client, raw, 30 if options.quick else 500),
                **regions(client, at.http, size),
            }
    finally:
        peer.kill()
    show(rows)
    if not options.quick:
        print(write_result("transport", {"rows": rows}))


if __name__ == "__main__":
    main()
