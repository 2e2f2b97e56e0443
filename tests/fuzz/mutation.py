"""Changes a problem's message field by field: bytes changed at random nearly always only break the outermost length."""

from __future__ import annotations

import random
from collections.abc import Callable

from dqkv.v1 import gradient_pb2 as pb

NUMBERS = (0, 1, 2, 3, 7, 8, 9, 255, 256, 257, 2**31 - 1, 2**61, 2**62, 2**63 - 1, -1, -(2**63))


def change(problem: pb.Problem, rng: random.Random) -> None:
    """One random change of one field."""
    rng.choice(_CHANGES)(problem, rng)


def _tensor(problem: pb.Problem, rng: random.Random) -> pb.Tensor:
    return rng.choice(problem.tensors) if problem.tensors else problem.tensors.add()


def _data(problem: pb.Problem, rng: random.Random) -> None:
    tensor = _tensor(problem, rng)
    tensor.data = tensor.data[: rng.randint(0, len(tensor.data))] if rng.random() < 0.5 else tensor.data + b"\0"


def _numbers(numbers: list[int], rng: random.Random, limit: int = 2**63) -> list[int]:
    wanted = [number for number in NUMBERS if -limit <= number < limit]
    numbers = list(numbers)
    if not numbers or rng.random() < 0.2:
        return [*numbers, rng.choice(wanted)]
    if rng.random() < 0.2:
        return numbers[:-1]
    numbers[rng.randrange(len(numbers))] = rng.choice(wanted)
    return numbers


def _shape(problem: pb.Problem, rng: random.Random) -> None:
    tensor = _tensor(problem, rng)
    tensor.shape[:] = _numbers(list(tensor.shape), rng)


def _region(problem: pb.Problem, rng: random.Random) -> None:
    region = _tensor(problem, rng).region if rng.random() < 0.5 or not problem.outputs else problem.outputs[0].region
    region.handle = bytes(rng.choice((16, 16, 16, 0, 17)))
    region.byte_offset = rng.choice(NUMBERS)
    region.strides[:] = _numbers(list(region.strides), rng)


def _enums(problem: pb.Problem, rng: random.Random) -> None:
    tensor = _tensor(problem, rng)
    if rng.random() < 0.5:
        tensor.dtype = rng.randint(0, 5)  # type: ignore[assignment]
    else:
        tensor.role = rng.randint(0, 15)  # type: ignore[assignment]


def _lengths(problem: pb.Problem, rng: random.Random) -> None:
    side = rng.choice((problem.queries, problem.keys))
    numbers = rng.choice((side.cu_seqlens, side.seqused))
    numbers[:] = _numbers(list(numbers), rng, 2**31)
    side.max_seqlen = rng.choice((0, 1, 2, 2**31 - 1))


def _options(problem: pb.Problem, rng: random.Random) -> None:
    options = problem.options
    options.softmax_scale = rng.choice((0.0, -1.0, float("inf"), float("nan"), 1e39))
    options.softcap = rng.choice((0.0, 1.0, -1.0, float("nan")))
    options.window.left = rng.choice(NUMBERS)
    options.window.sink_token_length = rng.choice(NUMBERS)
    options.grad_dtype = rng.randint(0, 5)  # type: ignore[assignment]
    options.arch = rng.randint(0, 6)  # type: ignore[assignment]
    options.lse_scope = rng.randint(0, 2)  # type: ignore[assignment]


def _outputs(problem: pb.Problem, rng: random.Random) -> None:
    problem.outputs.add(role=rng.randint(0, 15), region=pb.RegionSlice(handle=bytes(16)))  # type: ignore[arg-type]


_CHANGES: tuple[Callable[[pb.Problem, random.Random], None], ...] = (
    _data,
    _data,
    _shape,
    _region,
    _enums,
    _lengths,
    _options,
    _outputs,
)
