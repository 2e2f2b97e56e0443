"""The chain on one GPU: its kernels and its scratch memory, for problems of any shape on the current stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping

import torch

from dqkv import errors
from dqkv.problem import Arch, Gradients, Problem
from dqkv.tensor import DType
from dqkv_kernels.arguments import Argument
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.key import Kernel
from dqkv_kernels.launch_plan import ARCHS, LaunchPlan, target_of
from dqkv_kernels.launches import Launches, statistic_shape, statistics
from dqkv_kernels.tiles import ARCH_TARGETS
from dqkv_kernels.workspace import Workspace

__all__ = ["Chain", "Workspace"]

SHAPES_KEPT = 64
"""Shapes of problems whose launches and table stay on the device: a few kilobytes each, more with many sequences."""


class Chain:
    """The kernels and the scratch memory of one stream of one device."""

    def __init__(self, artifacts: Artifacts, workspace: Workspace) -> None:
        """Raises ArchUnavailable when the device's compute capability has no kernels."""
        self.artifacts, self.workspace = artifacts, workspace
        self.target = target_of(torch.cuda.get_device_capability(workspace.device))
        # with its number, as the tensors on it have it
        self.device = torch.empty(0, device=workspace.device).device
        self._shapes: OrderedDict[Hashable, Launches] = OrderedDict()

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The families of kernels that the device runs, best first."""
        ours = {number: arch for arch, number in ARCHS.items()}
        return tuple(ours[n] for n in sorted(ARCH_TARGETS, reverse=True) if self.target in ARCH_TARGETS[n])

    def refuses(self, problem: Problem[object]) -> str | None:
        """Why no kernel for this device computes the problem, in words, or None when one does."""
        if problem.options.arch not in (Arch.AUTO, *self.archs):
            return f"arch is {problem.options.arch}, the kernels present are for {', '.join(self.archs)}"
        if problem.dtype is DType.FP32:
            return "q is fp32, the kernels of a GPU take fp16 and bf16"
        return None

    def backward(
        self,
        problem: Problem[object],
        tensors: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor] | None = None,
    ) -> Gradients[torch.Tensor]:
        """dq, dk, dv (and dsink with a sink) of a problem whose tensors lie on the chain's device.

        tensors: by role, of the shapes and dtypes that `problem` says and any strides. gradients: memory for the
        answers, of any strides; what is not in it is allocated dense. Runs on the current stream and does not wait for
        it. Raises ArtifactMissing when a kernel was not built, ArchUnavailable, TooLarge, and ShapeMismatch or
        DTypeMismatch when a tensor is not the problem's; nothing is launched then.
        """
        index = self.device.index
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self.backward(problem, tensors, gradients)
        launches = self._launches(problem)
        answers = launches.run(tensors, gradients or {}, self.workspace)
        return Gradients(
            dq=answers["dq"],
            dk=answers["dk"],
            dv=answers["dv"],
            dsink=answers.get("dsink"),
            report=launches.report,
        )

    def statistics(self, problem: Problem[object], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """softmax_lse over exactly the problem's keys, recomputed from q, k and sink: fp32, natural log.

        The shape is (batch_size, num_heads_q, seqlen_q), or (num_heads_q, rows_q) where the queries are packed; -inf
        (or the sink) in rows that see no key, -inf in rows that no sequence owns. Runs and raises as `backward`.
        """
        with torch.cuda.device(self.device):
            plan = LaunchPlan(problem=problem, target=self.target)
            launch = self.artifacts.load_all({Kernel.STATISTICS: plan.statistics_key})[Kernel.STATISTICS]
            answer = torch.full(statistic_shape(problem), float("-inf"), dtype=torch.float32, device=self.device)
            sequences = torch.from_numpy(plan.sequences).to(self.device)
            sinks = torch.zeros(problem.shape.num_heads_q, dtype=torch.float32, device=self.device)
            if "sink" in tensors:
                sinks.copy_(tensors["sink"])
            q, k = (
                Argument(is_packed=lengths.is_packed, has_vectors=True).read(tensors[role])
                for role, lengths in (("q", problem.queries), ("k", problem.keys))
            )
            statistics(plan, launch, (q, k, sinks, answer, sequences))
        return answer[0] if problem.queries.is_packed else answer

    def _launches(self, problem: Problem[object]) -> Launches:
        sink = None if problem.sink is None else problem.sink.dtype
        given = (problem.out is None, problem.softmax_lse is None, problem.dlse is None, sink)
        key = (problem.dtype, problem.shape, problem.queries, problem.keys, problem.options, given)
        launches = self._shapes.get(key)
        if launches is None:
            launches = self._work_out(problem)
            self._shapes[key] = launches
            if len(self._shapes) > SHAPES_KEPT:
                self._shapes.popitem(last=False)
        else:
            self._shapes.move_to_end(key)
        if not launches.has_scratch_of(self.workspace) and self.workspace.must_grow(launches.scratch_shapes()):
            # views of what is about to be replaced would keep it alive
            for other in self._shapes.values():
                other.forget_scratch()
        return launches

    def _work_out(self, problem: Problem[object]) -> Launches:
        refusal = self.refuses(problem)
        if refusal is not None:
            raise errors.ArchUnavailable(refusal, field="arch")
        bare = problem.with_tensors({role: tensor.with_data(None) for role, tensor in problem.tensors.items()})
        plan = LaunchPlan(problem=bare, target=self.target)
        return Launches(plan, self.artifacts.load_all(plan.keys), self.device)
