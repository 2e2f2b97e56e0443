"""What is left of the CPU backend's speed end to end: through a real server by region, against PyTorch's own backward.

    python benchmarks/cpu_server.py [--quick]

As `cpu_backend.py`, but ours is a blocking client's whole call to a server in processes of its own, whose inputs and
gradients lie in a memfd region. Results go to benchmarks/results/cpu_server.json.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from cpu_backend import Tensors, plain_rows, table
from machine import write_result

import dqkv
from dqkv.cli.own_server import OwnServer
from dqkv.problem import Problem

TARGET = 0.85
SEQLEN_QUICK = 1024


class ByRegion:
    """Computes problems through a server; each problem's tensors are put into a region once, before it is timed."""

    def __init__(self, client: dqkv.Client) -> None:
        self._client = client
        self._placed: tuple[Problem[Any], dqkv.Region, dict[str, Any]] | None = None

    def __call__(self, problem: Problem[Any], tensors: Tensors, gradients: Tensors) -> str:
        """The gradients of the problem, in the region; returns the kernel that ran."""
        if self._placed is None or self._placed[0] is not problem:
            self.close()
            self._placed = (problem, *self._place(problem, tensors, gradients))
        options = problem.options
        given = {"window": options.window, "softcap": options.softcap, "deterministic": options.deterministic}
        return self._client.backward(**self._placed[2], **given).report.kernel

    def close(self) -> None:
        """Gives the region back."""
        if self._placed is not None:
            region, self._placed = self._placed[1], None
            region.close()

    def _place(
        self, problem: Problem[Any], tensors: Tensors, gradients: Tensors
    ) -> tuple[dqkv.Region, dict[str, torch.Tensor]]:
        wanted = {role: tensors[role] for role in problem.tensors} | gradients
        region = self._client.region(sum(tensor.nbytes + 64 for tensor in wanted.values()))
        placed = {role: region.torch(tensor.shape, tensor.dtype) for role, tensor in wanted.items()}
        for role, tensor in wanted.items():
            placed[role].copy_(tensor)
        return region, placed


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seqlen 1024 only, 3 pairs; writes no result")
    arguments = parser.parse_args()
    chosen = [row for row in plain_rows(TARGET) if row.keys <= SEQLEN_QUICK or not arguments.quick]
    with OwnServer() as at, dqkv.Client(at.grpc) as client:
        ours = ByRegion(client)
        found = table(chosen, 3 if arguments.quick else 5, ours)
        ours.close()
    if not arguments.quick:
        write_result("cpu_server", {"rows": found})


if __name__ == "__main__":
    main()
