"""Runs problems on a GPU with poisoned memory, and keeps what was seen for the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from oracle.case import AS_IS, Case, Variant
from oracle.inputs import Inputs, build_inputs
from oracle.problems import as_given, to_problem

from dqkv.problem import INPUT_ROLES, Problem
from dqkv_kernels import attention_backward
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.chain import Chain
from dqkv_kernels.dtypes import TORCH_DTYPES


@dataclass(kw_only=True)
class Record:
    """What one run saw: the PTX of the kernels that ran, error over budget by arch, answer and gradient, and facts."""

    kernels: dict[str, str] = field(default_factory=dict)
    errors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class NotedArtifacts(Artifacts):
    """Artifacts that note the SHA-256 of the PTX of each kernel they load."""

    def __init__(self, directory: Any, record: Record) -> None:
        super().__init__(directory)
        self.record = record

    def verify(self, key: Any) -> dict[str, Any]:
        """As the base class."""
        manifest = super().verify(key)
        self.record.kernels[key.name] = manifest["ptx_sha256"]
        return manifest


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Gradients by name, as the oracle's judge takes them."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device with kernels, one chain for all problems, and the record."""

    device: torch.device
    artifacts: Artifacts
    chain: Chain
    record: Record

    def inputs(self, case: Case, variant: Variant = AS_IS, arch: str = "auto") -> Inputs:
        """The request of a case on this device, for one family of kernels."""
        return replace(build_inputs(case, variant, self.device), arch=arch)

    def run(self, inputs: Inputs) -> Answer:
        """One answer, into memory and from scratch memory that hold NaN."""
        problem = to_problem(inputs, as_given)
        tensors = {role: getattr(inputs, role) for role in INPUT_ROLES if getattr(inputs, role) is not None}
        return self.answer(problem, tensors, self.chain)

    def answer(self, problem: Problem[Any], tensors: Mapping[str, torch.Tensor], chain: Chain) -> Answer:
        """One answer of a given chain; waits for nothing."""
        for buffer in chain.workspace.buffers.values():
            buffer.fill_(255)  # NaN as fp32, -1 as int32
        gradients = {
            role: torch.full(spec.shape, float("nan"), dtype=TORCH_DTYPES[spec.dtype], device=self.device)
            for role, spec in problem.gradients.items()
        }
        found = attention_backward(problem, tensors, gradients, chain=chain)
        return Answer(dq=found.dq, dk=found.dk, dv=found.dv, dsink=found.dsink)
