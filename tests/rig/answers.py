"""A drawn problem as a client's arguments, and its answer held against the oracle."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import torch

import dqkv
from dqkv import oracle
from dqkv.trials import CAUSAL, Drawn, Trial, draw

TRIAL = Trial(name="client", shows="", seqlen_q=40, seqlen_k=56, num_heads_q=4, num_heads_kv=2, options=CAUSAL)


def drawn_problem() -> Drawn:
    return draw(TRIAL)


def arguments(drawn: Drawn) -> dict[str, Any]:
    """What Client.backward takes for it."""
    return {role: tensor.data for role, tensor in drawn.problem.tensors.items()} | {"causal": True}


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_numpy(array: Any) -> np.ndarray:
    return array.float().numpy() if isinstance(array, torch.Tensor) else array


def assert_right(drawn: Drawn, gradients: dqkv.Gradients[Any]) -> None:
    roles = {role: as_numpy(getattr(gradients, role)) for role in drawn.expected.gradients}
    assert oracle.complaints(drawn.expected, roles) == []


def run(program: str, address: str) -> str:
    """What a process of its own prints; its only argument is the address."""
    done = subprocess.run([sys.executable, "-c", program, address], capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
