"""The process that runs a family of kernels on one GPU against the oracle (`python -m dqkv.backend.selftest`).

A line of JSON on stdout for each trial as it is done. What hangs or crashes takes this process with it, and no other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from dqkv import oracle
from dqkv.backend.kernel_sets import artifacts_in
from dqkv.problem import INPUT_ROLES, Arch, Options, Problem
from dqkv.tensor import DType
from dqkv.trials import TRIALS, Array, Trial, draw
from dqkv_kernels.build import default_set
from dqkv_kernels.chain import Chain, Workspace
from dqkv_kernels.dtypes import TORCH_DTYPES
from dqkv_kernels.key import Kernel
from dqkv_kernels.launch_plan import ARCHS

REPEATS = 3
"""Answers to each trial: what races does not do so every time."""
ODD_WIDTHS = ((8, 8), (72, 72), (96, 96), (104, 112), (128, 8), (160, 128), (192, 192), (200, 248))
"""Head dims that no row of a table of tiles has."""

Answer = Callable[[Problem[Array]], Mapping[str, Array]]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A trial and what is wrong with an answer to it, in words; empty when all answers were right."""

    trial: str
    wrong: tuple[str, ...] = ()


def trials(arch: Arch, target: str) -> tuple[Trial, ...]:
    """What a family has to answer: all that `dqkv check` sends, then every main loop of it, then odd widths."""
    given = [trial for trial in TRIALS if trial.dtype is not DType.FP32]
    causal = next(trial for trial in TRIALS if trial.name == "causal_cross")
    for key in default_set(ARCHS[arch], target):
        if key.kernel is Kernel.MAIN_LOOP and key.head_dim_v is not None:
            options = replace(
                causal.options,
                softcap=8.0 if key.softcap else 0.0,
                grad_dtype=DType.FP32 if key.grad_dtype == "fp32" else None,
            )
            wide = replace(causal, head_dim=key.head_dim, head_dim_v=key.head_dim_v)
            given.append(replace(wide, name=key.name, dtype=DType(key.dtype), options=options))
    for head_dim, head_dim_v in ODD_WIDTHS:
        name = f"width_{head_dim}_{head_dim_v}"
        given.append(replace(causal, name=name, head_dim=head_dim, head_dim_v=head_dim_v))
    repeated = next(trial for trial in TRIALS if trial.name == "long")
    given.append(replace(repeated, name="long_deterministic", options=Options(deterministic=True)))
    return tuple(given)


def outcomes(wanted: tuple[Trial, ...], answer: Answer) -> Iterator[Outcome]:
    """Holds the answers to each trial against the oracle, and where it is deterministic against each other."""
    for trial in wanted:
        drawn = draw(trial)
        first: Mapping[str, Array] | None = None
        wrong: list[str] = []
        for _ in range(REPEATS):
            given = answer(drawn.problem)
            wrong += oracle.complaints(drawn.expected, given)
            first = given if first is None else first
            if trial.options.deterministic and any(given[role].tobytes() != first[role].tobytes() for role in given):
                wrong.append("is deterministic, and differs from run to run")
        yield Outcome(trial=trial.name, wrong=tuple(dict.fromkeys(wrong)))


def on_device(chain: Chain, arch: Arch) -> Answer:
    """Answers by one family of a chain, into memory that held NaN."""

    def answer(problem: Problem[Array]) -> Mapping[str, Array]:
        asked = replace(problem, options=replace(problem.options, arch=arch))
        given = {role: getattr(problem, role) for role in INPUT_ROLES}
        tensors = {
            role: _tensor(item.data, item.dtype, chain.device) for role, item in given.items() if item is not None
        }
        gradients = {
            role: torch.full(spec.shape, float("nan"), dtype=TORCH_DTYPES[spec.dtype], device=chain.device)
            for role, spec in asked.gradients.items()
        }
        chain.backward(asked, tensors, gradients)
        torch.cuda.synchronize(chain.device)
        return {role: gradient.float().cpu().numpy() for role, gradient in gradients.items()}

    return answer


def _tensor(array: Array, dtype: DType, device: torch.device) -> torch.Tensor:
    """A copy on the device; numpy knows no bf16, so the bytes travel."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
    return torch.from_numpy(flat).view(TORCH_DTYPES[dtype]).reshape(array.shape).to(device)


def main() -> None:
    """Run one family on one GPU, and say what came of each trial."""
    parser = argparse.ArgumentParser(prog="dqkv.backend.selftest", description="Runs kernels against the oracle.")
    parser.add_argument("kernels", type=Path, help="directory of the built kernels")
    parser.add_argument("arch", type=Arch, help="family of kernels")
    parser.add_argument("index", type=int, help="number of the GPU")
    given: Any = parser.parse_args()
    device = torch.device("cuda", given.index)
    torch.cuda.set_device(device)
    chain = Chain(artifacts_in(given.kernels, builds=False), Workspace(device))
    for outcome in outcomes(trials(given.arch, chain.target), on_device(chain, given.arch)):
        sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
