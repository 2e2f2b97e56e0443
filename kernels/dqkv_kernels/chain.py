"""One problem on one GPU: its kernels, its workspace, and their launches in order on the current stream."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from dqkv import errors
from dqkv.problem import Arch, Problem
from dqkv.tensor import DType
from dqkv_kernels.artifacts import Artifacts
from dqkv_kernels.key import Kernel, KernelKey
from dqkv_kernels.tiles import ARCH_TARGETS, STATISTICS_ARCH, TARGETS, Tile, tile_holding

ARCHS = {Arch.SM80: 80, Arch.SM90: 90}
LOG2_E = 1.4426950408889634
STATISTICS_TILE_M = 64
GRID_LIMIT = 2**31 - 1
TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
_ALIGNMENT_BYTES = 16


@dataclass
class Workspace:
    """Scratch memory of one stream of one device; grows to the largest problem seen and is then reused."""

    device: torch.device
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape with whatever was left in it; the same name gives the same memory again."""
        nbytes = max(math.prod(shape) * dtype.itemsize, _ALIGNMENT_BYTES)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            self.buffers.pop(name, None)
            buffer = self.buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def target_of(capability: tuple[int, int]) -> str:
    """The compiler target of a device's compute capability. Raises ArchUnavailable when it has none."""
    target = TARGETS.get(capability)
    if target is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted(TARGETS))
        raise errors.ArchUnavailable(
            f"compute capability {capability[0]}.{capability[1]} has no kernels, only {known} have", field="arch"
        )
    return target


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a problem needs from a compiler target: its kernels, its tile row and its sizes."""

    problem: Problem[object]
    target: str

    @cached_property
    def arch(self) -> int:
        """The arch asked for, or the newest that the target and the head dims have. Raises ArchUnavailable."""
        shape, asked = self.problem.shape, self.problem.options.arch
        wanted = sorted(ARCH_TARGETS, reverse=True) if asked is Arch.AUTO else [ARCHS.get(asked, 0)]
        for arch in wanted:
            if self.target in ARCH_TARGETS.get(arch, ()) and tile_holding(
                arch, self.target, shape.head_dim, shape.head_dim_v
            ):
                return arch
        raise errors.ArchUnavailable(
            f"arch {asked} has no kernel on {self.target} for head_dim {shape.head_dim} and {shape.head_dim_v}",
            field="arch",
        )

    @cached_property
    def tile(self) -> Tile:
        """The tile row that every kernel of the chain takes its sizes from."""
        shape = self.problem.shape
        tile = tile_holding(self.arch, self.target, shape.head_dim, shape.head_dim_v)
        if tile is None:
            raise errors.HeadDimUnsupported(f"head_dim {shape.head_dim} has no tile in arch {self.arch}", field="q")
        return tile

    @cached_property
    def keys(self) -> dict[Kernel, KernelKey]:
        """The kernels that will run, in order."""
        dtype, grad_dtype = self.problem.dtype, self.problem.options.grad_dtype or self.problem.dtype
        softcap = self.problem.options.softcap > 0
        head_dim, head_dim_v = self.tile.head_dim, self.tile.head_dim_v

        def key(kernel: Kernel, dtype: DType, **facts: object) -> KernelKey:
            return KernelKey(
                kernel=kernel,
                arch=STATISTICS_ARCH if kernel is Kernel.STATISTICS else self.arch,
                target=self.target,
                dtype=dtype.value,
                head_dim=head_dim,
                **facts,  # type: ignore[arg-type]
            )

        keys = [
            key(Kernel.PREPROCESS, dtype, head_dim_v=head_dim_v),
            key(Kernel.MAIN_LOOP, dtype, head_dim_v=head_dim_v, softcap=softcap, grad_dtype=grad_dtype.value),
            key(Kernel.POSTPROCESS, grad_dtype, head_dim_v=head_dim_v),
        ]
        if self.problem.softmax_lse is None:
            keys.insert(0, key(Kernel.STATISTICS, dtype, softcap=softcap))
        return {key.kernel: key for key in keys}

    @cached_property
    def sequences(self) -> NDArray[np.int64]:
        """The table (batch_size, 8) that device/seqlen.py describes."""
        problem, rows = self.problem, self.problem.rows
        batch = np.arange(problem.shape.batch_size, dtype=np.int64)
        zero = np.zeros_like(batch)
        padded = -(-rows.q_len // self.tile.tile_m) * self.tile.tile_m
        sides = []
        for lengths, start, count in (
            (problem.queries, rows.q_start, rows.q_len),
            (problem.keys, rows.k_start, rows.k_len),
        ):
            sides += [zero, start, count] if lengths.is_packed else [batch, zero, count]
        return np.stack([*sides, np.cumsum(padded) - padded, zero], axis=1)

    @property
    def padded_rows(self) -> int:
        """Rows of lse_log2, delta and dq_accum a head: each sequence's, rounded up to whole tiles."""
        tiles = -(-self.problem.rows.q_len // self.tile.tile_m)
        return max(int(tiles.sum()), 1) * self.tile.tile_m

    @property
    def scales(self) -> tuple[float, float]:
        """(inner_scale, outer_scale) as the main loop defines them."""
        scale, softcap = self.problem.softmax_scale, self.problem.options.softcap
        if softcap > 0:
            return 2 * LOG2_E * scale / softcap, softcap * LOG2_E
        return 0.0, scale * LOG2_E

    @property
    def window(self) -> tuple[int, int, int]:
        """(left, right, sink_token_length), within the lengths: a bound beyond them all is as good as none."""
        window, rows = self.problem.options.window, self.problem.rows
        longest_k = int(rows.k_len.max(initial=0))
        limit = int(rows.q_len.max(initial=0)) + longest_k + 1
        left, right = (
            limit if bound is None else max(-limit, min(limit, bound)) for bound in (window.left, window.right)
        )
        return left, right, min(window.sink_token_length, longest_k)

    def blocks(self, side: str, tile: int) -> int:
        """How many tiles of `tile` rows the longest sequence of a side ("q" or "k") has. Raises TooLarge."""
        lengths = self.problem.rows.q_len if side == "q" else self.problem.rows.k_len
        heads = self.problem.shape.num_heads_q if side == "q" else self.problem.shape.num_heads_kv
        tiles = -(-int(lengths.max(initial=0)) // tile)
        if tiles * heads * self.problem.shape.batch_size > GRID_LIMIT:
            raise errors.TooLarge(
                f"{tiles} tiles x {heads} heads x batch_size {self.problem.shape.batch_size} "
                f"pass {GRID_LIMIT} blocks of one launch",
                field="batch_size",
            )
        return tiles


def backward(
    problem: Problem[object],
    tensors: Mapping[str, torch.Tensor],
    artifacts: Artifacts,
    workspace: Workspace,
    gradients: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The gradients of a problem whose tensors lie on the workspace's device, by role, in the order dq, dk, dv, dsink.

    tensors: by role, of the shapes that `problem` says and any strides. gradients: memory for the answers, of any
    strides; what is not in it is allocated dense. Runs on the current stream and does not wait for it.
    Raises ArtifactMissing when a kernel was not built, ArchUnavailable and TooLarge.
    """
    capability = torch.cuda.get_device_capability(workspace.device)
    plan = Plan(problem=problem, target=target_of(capability))
    launches = {kernel: artifacts.load(key) for kernel, key in plan.keys.items()}
    with torch.cuda.device(workspace.device):
        return _run(plan, tensors, launches, workspace, dict(gradients or {}))


def _run(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    launches: Mapping[Kernel, object],
    workspace: Workspace,
    answers: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    problem, tile = plan.problem, plan.tile
    shape, heads = problem.shape, problem.shape.num_heads_q
    packed_q, packed_k = problem.queries.is_packed, problem.keys.is_packed
    for role, spec in problem.gradients.items():
        if role not in answers:
            answers[role] = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=workspace.device)
    _clear_unowned(problem, answers)
    tiles_q, tiles_k = plan.blocks("q", tile.tile_m), plan.blocks("k", tile.tile_n)
    q, dout = (_rows(tensors[role], packed_q) for role in ("q", "dout"))
    k, v = (_rows(tensors[role], packed_k) for role in ("k", "v"))
    sequences = workspace.take("sequences", (shape.batch_size, 8), torch.int64)
    sequences.copy_(torch.from_numpy(plan.sequences), non_blocking=True)
    window, scales = plan.window, plan.scales
    sink = tensors.get("sink")
    # whatever is absent is not read: any tensor of the right shape stands in for it
    sinks = workspace.take("sinks", (heads,), torch.float32) if sink is None else sink.to(torch.float32).contiguous()
    if problem.softmax_lse is None:
        lse = workspace.take("softmax_lse", _statistic_shape(problem), torch.float32)
        tiles = plan.blocks("q", STATISTICS_TILE_M)
        if tiles * heads * shape.batch_size:
            launches[Kernel.STATISTICS](  # type: ignore[operator]
                q, k, sinks, lse, sequences, tiles, *scales, *window, int(sink is not None)
            )
    else:
        lse = _statistic(tensors["softmax_lse"], packed_q)

    padded_rows = plan.padded_rows
    lse_log2, delta = (workspace.take(name, (heads, padded_rows), torch.float32) for name in ("lse_log2", "delta"))
    dq_accum = workspace.take("dq_accum", (heads, padded_rows * tile.head_dim), torch.float32)
    per_tile = (heads, padded_rows // tile.tile_m)
    turns = workspace.take("turns", per_tile, torch.int32)
    dsink_parts = workspace.take("dsink_parts", per_tile, torch.float32)
    given_delta, dlse = (_statistic(tensors[role], packed_q) if role in tensors else lse for role in ("delta", "dlse"))
    dq, dk, dv = (
        _rows(answers[role], packed, copy=False)
        for role, packed in (("dq", packed_q), ("dk", packed_k), ("dv", packed_k))
    )
    if tiles_q * heads * shape.batch_size:
        launches[Kernel.PREPROCESS](  # type: ignore[operator]
            _rows(tensors["out"], packed_q) if "out" in tensors else dout,
            dout,
            given_delta,
            lse,
            dlse,
            sinks,
            lse_log2,
            delta,
            dq_accum,
            turns,
            dsink_parts,
            sequences,
            tiles_q,
            int("delta" in tensors),
            int("dlse" in tensors),
            int(sink is not None),
        )
    if tiles_k * heads * shape.batch_size:
        launches[Kernel.MAIN_LOOP](  # type: ignore[operator]
            q,
            k,
            v,
            dout,
            lse_log2,
            delta,
            dq_accum,
            turns,
            dk,
            dv,
            sequences,
            tiles_k,
            *scales,
            problem.softmax_scale,
            *window,
            int(problem.options.deterministic),
        )
    if tiles_q * heads * shape.batch_size:
        launches[Kernel.POSTPROCESS](dq_accum, dq, sequences, tiles_q, padded_rows, problem.softmax_scale)  # type: ignore[operator]
    if sink is not None:
        tiles = int((-(-problem.rows.q_len // tile.tile_m)).sum())
        answers["dsink"].copy_(dsink_parts[:, :tiles].sum(1))
    for role, written in (("dq", dq), ("dk", dk), ("dv", dv)):
        if written.data_ptr() != answers[role].data_ptr():
            answers[role].copy_(written.view(answers[role].shape))
    return {role: answers[role] for role in problem.gradients}


def _clear_unowned(problem: Problem[object], answers: Mapping[str, torch.Tensor]) -> None:
    """Zeroes the gradients of a side on which some row belongs to no sequence; kernels write the others whole."""
    rows, shape = problem.rows, problem.shape
    if int(rows.q_len.sum()) != shape.rows_q:
        answers["dq"].zero_()
    if int(rows.k_len.sum()) != shape.rows_k:
        answers["dk"].zero_()
        answers["dv"].zero_()


def _rows(tensor: torch.Tensor, packed: bool, copy: bool = True) -> torch.Tensor:
    """The tensor as (batches, rows, heads, width) in 16-byte vectors: itself, or else a copy (for answers, zeros)."""
    view = tensor.unsqueeze(0) if packed else tensor
    vector = _ALIGNMENT_BYTES // view.dtype.itemsize
    # a dimension of size 1 may carry any stride
    strides = [0 if size == 1 else stride for size, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True)]
    aligned = view.data_ptr() % _ALIGNMENT_BYTES == 0 and all(stride % vector == 0 for stride in strides)
    if view.numel() and aligned and view.stride(-1) == 1:
        return view.as_strided(view.shape, (*strides, 1))
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
