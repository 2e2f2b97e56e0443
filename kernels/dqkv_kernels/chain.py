"""The chain on one GPU: its kernels, its scratch memory, and their launches in order on the current stream."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch

from dqkv.problem import Arch, Gradients, Problem, Report
from dqkv.tensor import DType
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.key import Kernel
from dqkv_kernels.launch_plan import ARCHS, LaunchPlan, target_of
from dqkv_kernels.tiles import ARCH_TARGETS

STATISTICS_TILE_M = 64
PREPARED_KEPT = 64
"""Shapes of problems whose plan and table stay on the device: a few kilobytes each, more with many sequences."""
TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
_ALIGNMENT_BYTES = 16


@dataclass
class Workspace:
    """Scratch memory of one stream of one device; grows to the largest problem seen and is then reused."""

    device: torch.device
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    generation: int = 0
    """Counts the times a buffer grew: views taken before are then of memory given back."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape with whatever was left in it; the same name gives the same memory again."""
        nbytes = max(math.prod(shape) * dtype.itemsize, _ALIGNMENT_BYTES)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            self.buffers.pop(name, None)
            buffer = self.buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.generation += 1
        return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def must_grow(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether any of these 4-byte tensors does not fit what is there under its name."""
        have = {name: buffer.numel() for name, buffer in self.buffers.items()}
        return any(math.prod(shape) * 4 > have.get(name, 0) for name, shape in shapes.items())


@dataclass(frozen=True, kw_only=True)
class _Scratch:
    """Views of the workspace that the kernels of one problem share; shapes as the main loop says."""

    generation: int
    lse_log2: torch.Tensor
    delta: torch.Tensor
    dq_accum: torch.Tensor
    turns: torch.Tensor
    dsink_parts: torch.Tensor
    sinks: torch.Tensor
    softmax_lse: torch.Tensor


@dataclass(kw_only=True)
class _Prepared:
    """What is the same for every problem of one shape: its plan, its launch functions, its table on the device."""

    plan: LaunchPlan
    launches: Mapping[Kernel, Callable[..., None]]
    sequences: torch.Tensor
    scratch: _Scratch | None = None


class Chain:
    """The kernels and the scratch memory of one stream of one device."""

    def __init__(self, artifacts: Artifacts, workspace: Workspace) -> None:
        """Raises ArchUnavailable when the device's compute capability has no kernels."""
        self.artifacts, self.workspace = artifacts, workspace
        self.device = workspace.device
        self.target = target_of(torch.cuda.get_device_capability(workspace.device))
        self._prepared: OrderedDict[Hashable, _Prepared] = OrderedDict()

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The families of kernels that the device runs, best first."""
        ours = {number: arch for arch, number in ARCHS.items()}
        return tuple(ours[n] for n in sorted(ARCH_TARGETS, reverse=True) if self.target in ARCH_TARGETS[n])

    def backward(
        self,
        problem: Problem[object],
        tensors: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor] | None = None,
    ) -> Gradients[torch.Tensor]:
        """dq, dk, dv (and dsink with a sink) of a problem whose tensors lie on the chain's device.

        tensors: by role, of the shapes that `problem` says and any strides. gradients: memory for the answers, of any
        strides; what is not in it is allocated dense. Runs on the current stream and does not wait for it.
        Raises ArtifactMissing when a kernel was not built, ArchUnavailable and TooLarge.
        """
        with torch.cuda.device(self.device):
            prepared = self._prepare(problem)
            answers = _run(prepared, self._scratch(prepared, problem), problem, tensors, dict(gradients or {}))
        plan = prepared.plan
        report = Report(
            arch=f"sm{plan.arch}",
            kernel=plan.keys[Kernel.MAIN_LOOP].name,
            device=str(self.device),
            softmax_lse_recomputed=problem.softmax_lse is None,
        )
        return Gradients(
            dq=answers["dq"], dk=answers["dk"], dv=answers["dv"], dsink=answers.get("dsink"), report=report
        )

    def statistics(self, problem: Problem[object], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """softmax_lse over exactly the problem's keys, recomputed from q, k and sink: fp32, natural log.

        The shape is (batch_size, num_heads_q, seqlen_q), or (num_heads_q, rows_q) where the queries are packed; -inf
        (or the sink) in rows that see no key, -inf in rows that no sequence owns. Runs and raises as `backward`.
        """
        with torch.cuda.device(self.device):
            plan = LaunchPlan(problem=problem, target=self.target)
            launch = self.artifacts.load(plan.statistics_key)
            answer = torch.full(_statistic_shape(problem), float("-inf"), dtype=torch.float32, device=self.device)
            sequences = torch.from_numpy(plan.sequences).to(self.device)
            sinks = torch.zeros(problem.shape.num_heads_q, dtype=torch.float32, device=self.device)
            if "sink" in tensors:
                sinks.copy_(tensors["sink"])
            _statistics(plan, launch, tensors, sinks, answer, sequences)
        return answer[0] if problem.queries.is_packed else answer

    def _prepare(self, problem: Problem[object]) -> _Prepared:
        given = frozenset(problem.tensors)
        key = (problem.dtype, problem.shape, problem.queries, problem.keys, problem.options, given)
        prepared = self._prepared.get(key)
        if prepared is not None:
            self._prepared.move_to_end(key)
            return prepared
        # without the tensors, which would otherwise live as long as their shape is remembered
        bare = problem.with_tensors({role: tensor.with_data(None) for role, tensor in problem.tensors.items()})
        plan = LaunchPlan(problem=bare, target=self.target)
        prepared = _Prepared(
            plan=plan,
            launches={kernel: self.artifacts.load(kernel_key) for kernel, kernel_key in plan.keys.items()},
            sequences=torch.from_numpy(plan.sequences).to(self.device),
        )
        self._prepared[key] = prepared
        if len(self._prepared) > PREPARED_KEPT:
            self._prepared.popitem(last=False)
        return prepared

    def _scratch(self, prepared: _Prepared, problem: Problem[object]) -> _Scratch:
        """The problem's views of the workspace, taken again only when the workspace grew."""
        if prepared.scratch is not None and prepared.scratch.generation == self.workspace.generation:
            return prepared.scratch
        plan, heads = prepared.plan, problem.shape.num_heads_q
        tile, rows = plan.tile, plan.padded_rows
        shapes = {
            "lse_log2": (heads, rows),
            "delta": (heads, rows),
            "dq_accum": (heads, rows * tile.head_dim),
            "turns": (heads, rows // tile.tile_m),
            "dsink_parts": (heads, rows // tile.tile_m),
            "sinks": (heads,),
            "softmax_lse": _statistic_shape(problem) if problem.softmax_lse is None else (1, 1, 1),
        }
        if self.workspace.must_grow(shapes):
            # views of what is about to be replaced would keep it alive
            for other in self._prepared.values():
                other.scratch = None
        views = {
            name: self.workspace.take(name, shape, torch.int32 if name == "turns" else torch.float32)
            for name, shape in shapes.items()
        }
        prepared.scratch = _Scratch(generation=self.workspace.generation, **views)
        return prepared.scratch


def _run(
    prepared: _Prepared,
    scratch: _Scratch,
    problem: Problem[object],
    tensors: Mapping[str, torch.Tensor],
    answers: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    plan, launches, sequences = prepared.plan, prepared.launches, prepared.sequences
    packed_q, packed_k = problem.queries.is_packed, problem.keys.is_packed
    for role, spec in problem.gradients.items():
        if role not in answers:
            answers[role] = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=sequences.device)
    _clear_unowned(plan, answers)
    q, dout = (_rows(tensors[role], packed_q) for role in ("q", "dout"))
    k, v = (_rows(tensors[role], packed_k) for role in ("k", "v"))
    sink = tensors.get("sink")
    if sink is not None:
        scratch.sinks.copy_(sink)
    if problem.softmax_lse is None:
        lse = scratch.softmax_lse
        _statistics(plan, launches[Kernel.STATISTICS], tensors, scratch.sinks, lse, sequences)
    else:
        lse = _statistic(tensors["softmax_lse"], packed_q)
    # whatever is absent is not read: any tensor of the right shape stands in for it
    given_delta, dlse = (_statistic(tensors[role], packed_q) if role in tensors else lse for role in ("delta", "dlse"))
    dq = _rows(answers["dq"], packed_q, copy=False)
    dk, dv = (_rows(answers[role], packed_k, copy=False) for role in ("dk", "dv"))
    if plan.tiles_q:
        launches[Kernel.PREPROCESS](
            _rows(tensors["out"], packed_q) if "out" in tensors else dout,
            dout,
            given_delta,
            lse,
            dlse,
            scratch.sinks,
            scratch.lse_log2,
            scratch.delta,
            scratch.dq_accum,
            scratch.turns,
            scratch.dsink_parts,
            sequences,
            plan.tiles_q,
            int("delta" in tensors),
            int("dlse" in tensors),
            int(sink is not None),
        )
    if plan.tiles_k:
        launches[Kernel.MAIN_LOOP](
            q,
            k,
            v,
            dout,
            scratch.lse_log2,
            scratch.delta,
            scratch.dq_accum,
            scratch.turns,
            dk,
            dv,
            sequences,
            plan.tiles_k,
            *plan.scales,
            problem.softmax_scale,
            *plan.window,
            int(problem.options.deterministic),
        )
    if plan.tiles_q:
        launches[Kernel.POSTPROCESS](
            scratch.dq_accum, dq, sequences, plan.tiles_q, plan.padded_rows, problem.softmax_scale
        )
    if sink is not None:
        answers["dsink"].copy_(scratch.dsink_parts[:, : plan.tiles_in_all].sum(1))
    for role, written in (("dq", dq), ("dk", dk), ("dv", dv)):
        if written.data_ptr() != answers[role].data_ptr():
            answers[role].copy_(written.view(answers[role].shape))
    return answers


def _statistics(
    plan: LaunchPlan,
    launch: Callable[..., None],
    tensors: Mapping[str, torch.Tensor],
    sinks: torch.Tensor,
    answer: torch.Tensor,
    sequences: torch.Tensor,
) -> None:
    """Launches the statistics kernel into `answer` (batches, num_heads_q, rows)."""
    problem = plan.problem
    tiles = plan.tiles("q", STATISTICS_TILE_M)
    if tiles and problem.shape.num_heads_q:
        q, k = _rows(tensors["q"], problem.queries.is_packed), _rows(tensors["k"], problem.keys.is_packed)
        launch(q, k, sinks, answer, sequences, tiles, *plan.scales, *plan.window, int("sink" in tensors))


def _clear_unowned(plan: LaunchPlan, answers: Mapping[str, torch.Tensor]) -> None:
    """Zeroes the gradients of a side on which some row belongs to no sequence; kernels write the others whole."""
    if not plan.owns_queries:
        answers["dq"].zero_()
    if not plan.owns_keys:
        answers["dk"].zero_()
        answers["dv"].zero_()


def _rows(tensor: torch.Tensor, packed: bool, copy: bool = True) -> torch.Tensor:
    """The tensor as (batches, rows, heads, width) in 16-byte vectors: itself, or else a copy (for answers, zeros)."""
    view = tensor.unsqueeze(0) if packed else tensor
    vector = _ALIGNMENT_BYTES // view.dtype.itemsize
    shape, strides = view.shape, view.stride()
    if 1 in shape[:-1]:
        # a dimension of size 1 may carry any stride
        strides = (
            *(0 if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1], strict=True)),
            strides[-1],
        )
        view = view.as_strided(shape, strides)
    aligned = view.data_ptr() % _ALIGNMENT_BYTES == 0 and not any(stride % vector for stride in strides[:-1])
    if aligned and strides[-1] == 1 and view.numel():
        return view
    return (
        view.clone(memory_format=torch.contiguous_format)
        if copy
        else torch.zeros_like(view, memory_format=torch.contiguous_format)
    )


def _statistic(tensor: torch.Tensor, packed: bool) -> torch.Tensor:
    """The tensor as (batches, heads, rows)."""
    return tensor.unsqueeze(0) if packed else tensor


def _statistic_shape(problem: Problem[object]) -> tuple[int, int, int]:
    """(batches, heads, rows) of the query side's statistics."""
    shape = problem.shape
    if problem.queries.is_packed:
        return 1, shape.num_heads_q, shape.rows_q
    return shape.batch_size, shape.num_heads_q, shape.seqlen_q
