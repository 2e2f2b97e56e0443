"""What does a launch of the chain cost the host?

A row is a problem that is asked for again and again. python is the time of everything but the launches themselves, with
kernels that do nothing; on a machine with a GPU it is followed by the whole chain: into memory that is given, into
memory that it allocates, and through attention_backward. Microseconds a call, the median of samples of CALLS calls each
that wait for nothing, so that the device's own time does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from machine import describe

from dqkv.problem import Arch, Lengths, Options, Problem, Window
from dqkv.tensor import DType, Tensor
from dqkv_kernels import attention_backward
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.chain import Chain, Workspace
from dqkv_kernels.dtypes import TORCH_DTYPES
from dqkv_kernels.launch_plan import LaunchPlan
from dqkv_kernels.launches import Launches

ROOT = Path(__file__).resolve().parents[1]
BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 256, 4, 128
CALLS = 50
"""Three launches each, fewer than a device queues before it makes the host wait."""
SAMPLES = 30

Tensors = dict[str, torch.Tensor]


def microseconds(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """The median of samples of a call that is repeated; `wait` empties the device's queue between them."""
    samples = []
    for _ in range(SAMPLES + 2):
        wait()
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - begun) / CALLS * 1e6)
    return round(sorted(samples[2:])[SAMPLES // 2], 1)


def problems(device: torch.device) -> Iterator[tuple[str, Problem[None], Tensors]]:
    """The rows: a name, what is asked and the tensors."""
    for name, is_packed, has_statistics in (
        ("dense", False, True),
        ("packed", True, True),
        ("dense without softmax_lse", False, False),
    ):
        shape = (BATCH * SEQLEN, HEADS, HEAD_DIM) if is_packed else (BATCH, SEQLEN, HEADS, HEAD_DIM)
        statistics = (HEADS, BATCH * SEQLEN) if is_packed else (BATCH, HEADS, SEQLEN)
        tensors = {
            role: torch.randn(shape, device=device, dtype=torch.bfloat16) for role in ("q", "k", "v", "dout", "out")
        }
        if has_statistics:
            tensors["softmax_lse"] = torch.full(statistics, 8.0, device=device)
        lengths = Lengths(cu_seqlens=tuple(range(0, BATCH * SEQLEN + 1, SEQLEN))) if is_packed else Lengths()
        specs = {
            role: Tensor.dense(DType.FP32 if role == "softmax_lse" else DType.BF16, tuple(tensor.shape), None)
            for role, tensor in tensors.items()
        }
        yield name, Problem(**specs, queries=lengths, keys=lengths, options=Options(window=Window(right=0))), tensors


def python_alone(problem: Problem[None], tensors: Tensors, answers: Tensors) -> Callable[[], object]:
    """The work of a call but for its launches."""
    plan = LaunchPlan(problem=problem, target="sm_90a")
    device = tensors["q"].device
    launches = Launches(plan, dict.fromkeys(plan.keys, _nothing), device)
    workspace = Workspace(device)
    return lambda: launches.run(tensors, answers, workspace)


def _nothing(*_: object) -> None:
    """A kernel's launch."""


def measure(device: torch.device, chain: Chain | None) -> list[dict[str, Any]]:
    """Every row; without a chain those of python alone."""
    wait: Callable[[], object] = (lambda: None) if chain is None else torch.cuda.synchronize
    rows = []
    for name, problem, tensors in problems(device):
        answers = {
            role: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
            for role, spec in problem.gradients.items()
        }
        row: dict[str, Any] = {"problem": name, "python": microseconds(python_alone(problem, tensors, answers), wait)}
        if chain is not None:
            for arch in chain.archs:
                asked = Problem(
                    **problem.tensors,
                    queries=problem.queries,
                    keys=problem.keys,
                    options=Options(window=Window(right=0), arch=Arch(arch)),
                )
                row[arch.value] = _calls(asked, tensors, answers, chain, wait)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def _calls(
    problem: Problem[None], tensors: Tensors, answers: Tensors, chain: Chain, wait: Callable[[], object]
) -> dict[str, float]:
    calls: dict[str, Callable[[], object]] = {
        "given": lambda: chain.backward(problem, tensors, answers),
        "allocated": lambda: chain.backward(problem, tensors),
        "attention_backward": lambda: attention_backward(problem, tensors, answers, chain=chain),
    }
    return {name: microseconds(call, wait) for name, call in calls.items()}


def main() -> None:
    """Prints a row a problem, and writes all of them where --json says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=Path, default=ROOT / "build" / "kernels", help="directory of built kernels")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    chain = None
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        chain = Chain(Artifacts(arguments.kernels), Workspace(device))
    rows = measure(device, chain)
    if arguments.json:
        name = torch.cuda.get_device_name(device) if chain else "none"
        result = {"machine": {**describe(), "gpu": name}, "microseconds": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
