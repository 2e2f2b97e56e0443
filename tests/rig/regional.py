"""A sample's tensors in one region: inputs, then gradients, without gaps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dqkv.v1 import gradient_pb2 as pb

from .wire import Array, Sample, role_number

Bytes = NDArray[np.uint8]


def layout(one: Sample, base: int = 0) -> dict[str, int]:
    """Where each tensor begins, in bytes from the region's start."""
    places, end = {}, base
    for role, array in (*one.inputs.items(), *one.gradients.items()):
        places[role] = end
        end += 4 * array.size
    return places


def nbytes(one: Sample) -> int:
    """Bytes of all of them."""
    return sum(4 * array.size for array in (*one.inputs.values(), *one.gradients.values()))


def request(one: Sample, handle: bytes, *, base: int = 0, **moved: int) -> pb.BackwardRequest:
    """The request with every tensor in the region; `moved` puts single ones elsewhere, by role."""
    places = layout(one, base) | moved
    tensors = [
        pb.Tensor(
            role=role_number(role), dtype=pb.DATA_TYPE_FP32, shape=array.shape, region=_slice(handle, places[role])
        )
        for role, array in one.inputs.items()
    ]
    outputs = [pb.Output(role=role_number(role), region=_slice(handle, places[role])) for role in one.gradients]
    return pb.BackwardRequest(problem=pb.Problem(tensors=tensors, outputs=outputs))


def fill(memory: Bytes, one: Sample, base: int = 0) -> None:
    """Writes the inputs to their places, and NaN to the gradients'."""
    places = layout(one, base)
    for role, array in one.inputs.items():
        _at(memory, places[role], array)[...] = array
    for role, array in one.gradients.items():
        _at(memory, places[role], array)[...] = np.nan


def gradients(memory: Bytes, one: Sample, base: int = 0) -> dict[str, Array]:
    """Copies of what lies at the gradients' places."""
    places = layout(one, base)
    return {role: _at(memory, places[role], array).copy() for role, array in one.gradients.items()}


def _at(memory: Bytes, place: int, array: NDArray[Any]) -> Array:
    return memory[place : place + 4 * array.size].view(np.float32).reshape(array.shape)


def _slice(handle: bytes, byte_offset: int) -> pb.RegionSlice:
    return pb.RegionSlice(handle=handle, byte_offset=byte_offset)
