"""The launches of one problem's shape: worked out once, so that every later problem of it only fills in its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dqkv import errors
from dqkv.problem import Problem, Report
from dqkv_kernels.arguments import Argument
from dqkv_kernels.dtypes import TORCH_DTYPES
from dqkv_kernels.key import Kernel
from dqkv_kernels.launch_plan import LaunchPlan
from dqkv_kernels.workspace import Workspace

STATISTICS_TILE_M = 64
PACKED_BY_KEYS = ("k", "v", "dk", "dv")
WITHOUT_VECTORS = ("softmax_lse", "delta", "dlse")
Launch = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """Views of the workspace that the kernels of one problem share; shapes as the main loop says.

    preprocess and main_loop are what those kernels take of it, in order.
    """

    generation: int
    sinks: torch.Tensor
    softmax_lse: torch.Tensor
    dsink_parts: torch.Tensor
    dq_accum: torch.Tensor
    preprocess: tuple[Any, ...]
    main_loop: tuple[Any, ...]


class Launches:
    """What is the same for every problem of one shape, on one device, and its launches in order.

    plan: of a problem without its tensors, which would otherwise live as long as their shape is remembered. kernels:
    the launch function of every kernel of the plan.
    """

    def __init__(self, plan: LaunchPlan, kernels: Mapping[Kernel, Launch], device: torch.device) -> None:
        problem = plan.problem
        self.plan, self.device, self._kernels = plan, device, kernels
        self.sequences = torch.from_numpy(plan.sequences).to(device)
        self.report = Report(
            arch=f"sm{plan.arch}",
            kernel=plan.keys[Kernel.MAIN_LOOP].name,
            device=str(device),
            softmax_lse_recomputed=problem.softmax_lse is None,
        )
        inputs, answers = problem.tensors, problem.gradients
        self._inputs = {role: (spec.shape, TORCH_DTYPES[spec.dtype]) for role, spec in inputs.items()}
        self._answers = {role: (spec.shape, TORCH_DTYPES[spec.dtype]) for role, spec in answers.items()}
        self._arguments = {
            role: Argument(
                is_packed=(problem.keys if role in PACKED_BY_KEYS else problem.queries).is_packed,
                has_vectors=role not in WITHOUT_VECTORS,
            )
            for role in (*inputs, *answers)
            if "sink" not in role
        }
        self._scratch: Scratch | None = None
        self._launch_main_loop = kernels[Kernel.MAIN_LOOP]
        self._launch_preprocess, self._launch_postprocess = kernels[Kernel.PREPROCESS], kernels[Kernel.POSTPROCESS]
        self._main_loop_numbers = (
            plan.tiles_k,
            *plan.scales,
            problem.softmax_scale,
            *plan.window,
            int(problem.options.deterministic),
        )
        self._preprocess_numbers = (plan.tiles_q, *(int(role in inputs) for role in ("delta", "dlse", "sink")))
        self._postprocess_numbers = (self.sequences, plan.tiles_q, plan.padded_rows, problem.softmax_scale)

    def run(
        self, tensors: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], workspace: Workspace
    ) -> dict[str, torch.Tensor]:
        """The gradients by role: those of `given`, written, and others allocated dense.

        tensors: by role, of the shapes and dtypes of the plan's problem, any strides. Launches on the current stream of
        the current device, which is the plan's. Raises ShapeMismatch and DTypeMismatch before the first launch.
        """
        inputs = self._checked(tensors)
        answers = self._answers_in(given)
        scratch = self._scratch
        if scratch is None or not self.has_scratch_of(workspace):
            scratch = self._take(workspace)
        plan, arguments = self.plan, self._arguments
        self._clear_unowned(answers)
        q, k, v, dout = (arguments[role].read(inputs[role]) for role in ("q", "k", "v", "dout"))
        sink = inputs.get("sink")
        if sink is not None:
            scratch.sinks.copy_(sink)
        if "softmax_lse" in inputs:
            lse = arguments["softmax_lse"].read(inputs["softmax_lse"])
        else:
            lse = scratch.softmax_lse
            statistics(plan, self._kernels[Kernel.STATISTICS], (q, k, scratch.sinks, lse, self.sequences))
        # whatever is absent is not read: any tensor of the right shape stands in for it
        delta, dlse = (arguments[role].read(inputs[role]) if role in inputs else lse for role in ("delta", "dlse"))
        dq, dk, dv = (arguments[role].written(answers[role]) for role in ("dq", "dk", "dv"))
        if plan.tiles_q:
            out = arguments["out"].read(inputs["out"]) if "out" in inputs else dout
            self._launch_preprocess(out, dout, delta, lse, dlse, *scratch.preprocess, *self._preprocess_numbers)
        if plan.tiles_k:
            self._launch_main_loop(q, k, v, dout, *scratch.main_loop, dk, dv, self.sequences, *self._main_loop_numbers)
        if plan.tiles_q:
            self._launch_postprocess(scratch.dq_accum, dq, *self._postprocess_numbers)
        if sink is not None:
            answers["dsink"].copy_(scratch.dsink_parts[:, : plan.tiles_in_all].sum(1))
        for role, written in (("dq", dq), ("dk", dk), ("dv", dv)):
            if written.data_ptr() != answers[role].data_ptr():
                answers[role].copy_(written.view(answers[role].shape))
        return answers

    def has_scratch_of(self, workspace: Workspace) -> bool:
        """Whether the next run needs nothing new of the workspace."""
        return self._scratch is not None and self._scratch.generation == workspace.generation

    def forget_scratch(self) -> None:
        """Lets go of the workspace's memory, which is about to be replaced."""
        self._scratch = None

    def scratch_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the views of the workspace, by name; four bytes an element."""
        plan, heads = self.plan, self.plan.problem.shape.num_heads_q
        rows, tiles = plan.padded_rows, plan.padded_rows // plan.tile.tile_m
        return {
            "lse_log2": (heads, rows),
            "delta": (heads, rows),
            "dq_accum": (heads, rows * plan.tile.head_dim),
            "turns": (heads, tiles),
            "dsink_parts": (heads, tiles),
            "sinks": (heads,),
            "softmax_lse": statistic_shape(plan.problem) if plan.problem.softmax_lse is None else (1, 1, 1),
        }

    def _take(self, workspace: Workspace) -> Scratch:
        views = {
            name: workspace.take(name, shape, torch.int32 if name == "turns" else torch.float32)
            for name, shape in self.scratch_shapes().items()
        }
        lse_log2, delta, dq_accum, turns = (views[name] for name in ("lse_log2", "delta", "dq_accum", "turns"))
        self._scratch = Scratch(
            generation=workspace.generation,
            sinks=views["sinks"],
            softmax_lse=views["softmax_lse"],
            dsink_parts=views["dsink_parts"],
            dq_accum=dq_accum,
            preprocess=(views["sinks"], lse_log2, delta, dq_accum, turns, views["dsink_parts"], self.sequences),
            main_loop=(lse_log2, delta, dq_accum, turns),
        )
        return self._scratch

    def _checked(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        checked = {}
        for role, (shape, dtype) in self._inputs.items():
            tensor = tensors.get(role)
            if tensor is None:
                raise errors.ShapeMismatch(f"tensors lacks {role}, which the problem has", field=role)
            checked[role] = self._as_specified(role, tensor, shape, dtype)
        return checked

    def _answers_in(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for role in given:
            if role not in self._answers:
                raise errors.ShapeMismatch(
                    f"gradients holds {role}, the problem has {', '.join(self._answers)}", field=role
                )
        return {
            role: self._as_specified(role, given[role], shape, dtype)
            if role in given
            else torch.empty(shape, dtype=dtype, device=self.device)
            for role, (shape, dtype) in self._answers.items()
        }

    def _as_specified(
        self, role: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        if tensor.shape != shape:
            raise errors.ShapeMismatch(f"{role} has shape {tuple(tensor.shape)}, the problem says {shape}", field=role)
        if tensor.dtype is not dtype:
            raise errors.DTypeMismatch(f"{role} is {tensor.dtype}, the problem says {dtype}", field=role)
        if tensor.device != self.device:
            raise errors.ShapeMismatch(f"{role} is on {tensor.device}, the kernels run on {self.device}", field=role)
        return tensor.detach() if tensor.requires_grad else tensor

    def _clear_unowned(self, answers: Mapping[str, torch.Tensor]) -> None:
        """Zeroes the gradients of a side on which some row belongs to no sequence; kernels write the others whole."""
        if not self.plan.owns_queries:
            answers["dq"].zero_()
        if not self.plan.owns_keys:
            answers["dk"].zero_()
            answers["dv"].zero_()


def statistics(plan: LaunchPlan, launch: Launch, arguments: tuple[torch.Tensor, ...]) -> None:
    """Launches the statistics kernel. arguments: q, k, a sink a head, softmax_lse (batches, heads, rows), sequences."""
    problem = plan.problem
    tiles = plan.tiles("q", STATISTICS_TILE_M)
    if tiles and problem.shape.num_heads_q:
        launch(*arguments, tiles, *plan.scales, *plan.window, int("sink" in problem.tensors))


def statistic_shape(problem: Problem[Any]) -> tuple[int, int, int]:
    """(batches, heads, rows) of the query side's statistics."""
    shape = problem.shape
    if problem.queries.is_packed:
        return 1, shape.num_heads_q, shape.rows_q
    return shape.batch_size, shape.num_heads_q, shape.seqlen_q
