"""What the host hands to the kernels: whose memory, in which views, what is copied, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dqkv import errors
from dqkv.problem import Lengths, Options, Problem
from dqkv.tensor import DType, Tensor
from dqkv_kernels.key import Kernel
from dqkv_kernels.launch_plan import LaunchPlan
from dqkv_kernels.launches import Launches
from dqkv_kernels.workspace import Workspace

CPU = torch.device("cpu")
DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32}
DK, DV, DQ = 2.0, 3.0, 4.0
MAIN_LOOP_ANSWERS = {"dk": 8, "dv": 9}
"""Places of the answers among the main loop's arguments."""


class Kernels:
    """Stand-ins for the compiled kernels: they keep their arguments, and fill the answers with numbers."""

    def __init__(self) -> None:
        self.calls: dict[Kernel, list[tuple[Any, ...]]] = {kernel: [] for kernel in Kernel}

    def of(self, plan: LaunchPlan) -> dict[Kernel, Any]:
        return {kernel: getattr(self, kernel.value) for kernel in plan.keys}

    def statistics(self, *arguments: Any) -> None:
        self.calls[Kernel.STATISTICS].append(arguments)

    def preprocess(self, *arguments: Any) -> None:
        self.calls[Kernel.PREPROCESS].append(arguments)

    def main_loop(self, *arguments: Any) -> None:
        self.calls[Kernel.MAIN_LOOP].append(arguments)
        arguments[8].fill_(DK)
        arguments[9].fill_(DV)

    def postprocess(self, *arguments: Any) -> None:
        self.calls[Kernel.POSTPROCESS].append(arguments)
        arguments[1].fill_(DQ)

    def read(self) -> dict[str, torch.Tensor]:
        """What the last launches read, by role."""
        q, k, v, dout = self.calls[Kernel.MAIN_LOOP][-1][:4]
        out, _, delta, softmax_lse = self.calls[Kernel.PREPROCESS][-1][:4]
        return {"q": q, "k": k, "v": v, "dout": dout, "out": out, "softmax_lse": softmax_lse, "delta": delta}


def spec(tensor: torch.Tensor) -> Tensor[None]:
    return Tensor(dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape), strides=tuple(tensor.stride()), data=None)


def filled(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).remainder(251).to(dtype).view(shape)


def dense(batch: int = 2, seqlen: int = 70, heads: int = 2, width: int = 64) -> dict[str, torch.Tensor]:
    rows = {role: filled(batch, seqlen, heads, width) for role in ("q", "k", "v", "dout", "out")}
    return {**rows, "softmax_lse": filled(batch, heads, seqlen, dtype=torch.float32)}


def packed(lengths: tuple[int, ...] = (3, 70, 0), heads: int = 2, width: int = 64) -> dict[str, torch.Tensor]:
    rows = {role: filled(sum(lengths), heads, width) for role in ("q", "k", "v", "dout", "out")}
    return {**rows, "softmax_lse": filled(heads, sum(lengths), dtype=torch.float32)}


def problem_of(tensors: dict[str, torch.Tensor], lengths: Lengths | None = None, **options: Any) -> Problem[None]:
    sides = {} if lengths is None else {"queries": lengths, "keys": lengths}
    return Problem(**{role: spec(tensor) for role, tensor in tensors.items()}, options=Options(**options), **sides)


def launches_of(problem: Problem[None], kernels: Kernels) -> Launches:
    plan = LaunchPlan(problem=problem, target="sm_90a")
    return Launches(plan, kernels.of(plan), CPU)


PACKED = Lengths(cu_seqlens=(0, 3, 73, 73))


@pytest.fixture
def kernels() -> Kernels:
    return Kernels()


@pytest.mark.parametrize("lengths", [None, PACKED], ids=["dense", "packed"])
def test_dense_memory_is_read_and_written_where_it_is(kernels, lengths):
    tensors = dense() if lengths is None else packed()
    problem = problem_of(tensors, lengths)
    answers = launches_of(problem, kernels).run(tensors, {}, Workspace(CPU))
    for role, seen in kernels.read().items():
        if role in tensors:
            assert seen.data_ptr() == tensors[role].data_ptr()
            assert seen.numel() == tensors[role].numel()
            assert seen.dim() == 3 + (role != "softmax_lse")
    assert kernels.calls[Kernel.POSTPROCESS][-1][1].data_ptr() == answers["dq"].data_ptr()
    for role, value in (("dq", DQ), ("dk", DK), ("dv", DV)):
        assert (answers[role] == value).all()
        assert answers[role].shape == tensors[role[1:]].shape


def test_a_later_problem_of_the_shape_gets_its_own_memory_and_the_same_scratch(kernels):
    first, second, workspace = dense(), dense(), Workspace(CPU)
    launches = launches_of(problem_of(first), kernels)
    launches.run(first, {}, workspace)
    scratch = [argument.data_ptr() for argument in kernels.calls[Kernel.MAIN_LOOP][-1][4:8]]
    launches.run(second, {}, workspace)
    assert kernels.read()["q"].data_ptr() == second["q"].data_ptr()
    assert [argument.data_ptr() for argument in kernels.calls[Kernel.MAIN_LOOP][-1][4:8]] == scratch


def strided(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The same numbers in memory that is laid out otherwise."""
    if kind == "gaps":
        memory = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 8, dtype=tensor.dtype)[..., : tensor.shape[-1]]
    elif kind == "odd rows":
        memory = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype)[..., : tensor.shape[-1]]
    elif kind == "every second":
        memory = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=tensor.dtype)[..., ::2]
    else:
        memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return memory.copy_(tensor)


@pytest.mark.parametrize(
    ("kind", "copied"), [("gaps", False), ("odd rows", True), ("every second", True), ("misaligned", True)]
)
@pytest.mark.parametrize("lengths", [None, PACKED], ids=["dense", "packed"])
def test_rows_are_copied_only_where_kernels_cannot_read_them(kernels, kind, copied, lengths):
    plain = dense() if lengths is None else packed()
    tensors = {role: strided(tensor, kind) if role != "softmax_lse" else tensor for role, tensor in plain.items()}
    given = {f"d{role}": strided(torch.zeros_like(plain[role]), kind) for role in ("q", "k", "v")}
    launches = launches_of(problem_of(tensors, lengths), kernels)
    for _ in range(2):
        answers = launches.run(tensors, given, Workspace(CPU))
        for role in ("q", "k", "v", "dout", "out"):
            seen = kernels.read()[role]
            assert (seen.data_ptr() == tensors[role].data_ptr()) == (not copied)
            assert seen.data_ptr() % 16 == 0
            assert torch.equal(seen.reshape(plain[role].shape), plain[role])
        for role, value in (("dq", DQ), ("dk", DK), ("dv", DV)):
            assert answers[role].data_ptr() == given[role].data_ptr()
            assert (given[role] == value).all()


def test_memory_between_the_rows_of_an_answer_is_left_alone(kernels):
    tensors = dense()
    wide = torch.full((2, 70, 2, 64 + 9), 7.0, dtype=torch.bfloat16)
    launches_of(problem_of(tensors), kernels).run(tensors, {"dk": wide[..., 1:65]}, Workspace(CPU))
    assert (wide[..., 1:65] == DK).all()
    assert (wide[..., :1] == 7.0).all()
    assert (wide[..., 65:] == 7.0).all()


@pytest.mark.parametrize("stride", [3, 2**40])
def test_a_dimension_of_one_may_carry_any_stride(kernels, stride):
    tensors = dense(batch=1)
    odd = {role: tensor.as_strided(tensor.shape, (stride, *tensor.stride()[1:])) for role, tensor in tensors.items()}
    launches_of(problem_of(tensors), kernels).run(odd, {}, Workspace(CPU))
    seen = kernels.read()["q"]
    assert seen.data_ptr() == tensors["q"].data_ptr()
    assert not any(each % 8 or each >= 2**40 for each in seen.stride()[:-1])


def test_an_absent_softmax_lse_is_recomputed_into_scratch_memory(kernels):
    tensors = dense()
    lacking = {role: tensor for role, tensor in tensors.items() if role != "softmax_lse"}
    launches = launches_of(problem_of(lacking), kernels)
    launches.run(lacking, {}, Workspace(CPU))
    (arguments,) = kernels.calls[Kernel.STATISTICS]
    assert arguments[3].shape == tensors["softmax_lse"].shape
    assert kernels.read()["softmax_lse"].data_ptr() == arguments[3].data_ptr()
    assert launches.report.softmax_lse_recomputed


def test_a_workspace_that_another_shape_made_grow_is_taken_anew(kernels):
    small, large, workspace = dense(seqlen=5), dense(seqlen=300), Workspace(CPU)
    launches = launches_of(problem_of(small), kernels)
    launches.run(small, {}, workspace)
    launches_of(problem_of(large), kernels).run(large, {}, workspace)
    assert not launches.has_scratch_of(workspace)
    launches.run(small, {}, workspace)
    accumulators = [arguments[6] for arguments in kernels.calls[Kernel.MAIN_LOOP]]
    assert accumulators[2].data_ptr() == accumulators[1].data_ptr()


def test_rows_of_no_sequence_are_zero(kernels):
    tensors = packed()
    lengths = Lengths(cu_seqlens=(0, 3, 70, 70))
    given = {"dq": torch.full_like(tensors["q"], float("nan"))}
    kernels.postprocess = lambda *arguments: arguments[1][:, :70].fill_(DQ)
    answers = launches_of(problem_of(tensors, lengths), kernels).run(tensors, given, Workspace(CPU))
    assert (answers["dq"][:70] == DQ).all()
    assert (answers["dq"][70:] == 0).all()


def test_a_problem_without_queries_launches_nothing_over_them(kernels):
    tensors = dense(seqlen=4)
    tensors |= {role: filled(2, 0, 2, 64) for role in ("q", "dout", "out")}
    tensors["softmax_lse"] = filled(2, 2, 0, dtype=torch.float32)
    launches_of(problem_of(tensors), kernels).run(tensors, {}, Workspace(CPU))
    assert not kernels.calls[Kernel.PREPROCESS]
    assert not kernels.calls[Kernel.POSTPROCESS]
    assert len(kernels.calls[Kernel.MAIN_LOOP]) == 1


def test_a_tensor_that_requires_grad_is_taken_without_it(kernels):
    tensors = dense()
    tensors["q"].requires_grad_()
    launches_of(problem_of(tensors), kernels).run(tensors, {}, Workspace(CPU))
    assert not kernels.read()["q"].requires_grad


@pytest.mark.parametrize(
    ("role", "other", "error"),
    [
        ("k", filled(2, 71, 2, 64), errors.ShapeMismatch),
        ("v", filled(2, 70, 2, 64, dtype=torch.float16), errors.DTypeMismatch),
        ("dout", torch.empty(2, 70, 2, 64, dtype=torch.bfloat16, device="meta"), errors.ShapeMismatch),
    ],
)
def test_a_tensor_that_is_not_the_problems_is_refused_before_any_launch(kernels, role, other, error):
    tensors = dense()
    launches = launches_of(problem_of(tensors), kernels)
    with pytest.raises(error, match=role):
        launches.run({**tensors, role: other}, {}, Workspace(CPU))
    assert not any(kernels.calls.values())


def test_a_tensor_that_is_missing_and_an_answer_that_is_unknown_are_refused(kernels):
    tensors = dense()
    launches = launches_of(problem_of(tensors), kernels)
    with pytest.raises(errors.ShapeMismatch, match="lacks dout"):
        launches.run({role: tensor for role, tensor in tensors.items() if role != "dout"}, {}, Workspace(CPU))
    with pytest.raises(errors.ShapeMismatch, match="dsink"):
        launches.run(tensors, {"dsink": torch.zeros(2)}, Workspace(CPU))
    assert not any(kernels.calls.values())


def test_a_sinks_gradient_is_the_sum_over_its_tiles(kernels):
    tensors = {**dense(), "sink": torch.tensor([0.5, -1.0])}
    problem = problem_of(tensors)
    launches = launches_of(problem, kernels)

    def preprocess(*arguments: Any) -> None:
        assert torch.equal(arguments[5], tensors["sink"])
        arguments[10].fill_(1.0)

    launches = Launches(launches.plan, {**kernels.of(launches.plan), Kernel.PREPROCESS: preprocess}, CPU)
    answers = launches.run(tensors, {}, Workspace(CPU))
    tiles = 2 * -(-70 // launches.plan.tile.tile_m)
    assert answers["dsink"].tolist() == [tiles, tiles]
