"""The three ways of a case's request to a server: in one message, in a stream, and by reference to shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from oracle.inputs import Inputs
from torch import Tensor

from dqkv import Client, Gradients, Region, Window
from dqkv.client.segment import Kind
from dqkv.tensor import dense_strides

TIMEOUT_S = 120.0
ALWAYS_NBYTES = 1 << 40
"""An inline limit that no request reaches, so that it travels in one message."""
NEVER_NBYTES = -1
"""An inline limit that every request is above, an empty one too."""
REGION_NBYTES = 24 << 20
ALIGNMENT = 64
GAP = -7.25
"""Lies between the rows of gradients, and is in every dtype what it is."""

TENSORS = ("q", "k", "v", "dout", "out", "delta", "softmax_lse", "dlse", "sink")
GRADIENTS = {"dq": "q", "dk": "k", "dv": "v", "dsink": "sink"}


class Way(StrEnum):
    """How the tensors travel, in the words of the server's metrics."""

    UNARY = "unary"
    STREAM = "stream"
    REGION = "region"


def arguments(inputs: Inputs) -> dict[str, Any]:
    """The request as the arguments of `Client.backward`."""
    given = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    window = inputs.window
    given["window"] = Window(left=window.left, right=window.right, sink_token_length=window.sink_token_length)
    given["lse_scope"] = inputs.lse_scope.lower()
    return given


class Shelf:
    """A region that tensors are laid into, one after the other from its start, each as its storage is."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._end = 0
        self._storages: dict[int, int] = {}

    def lay(self, tensor: Tensor) -> Tensor:
        """The same elements, strides and place in a storage, in the region; views of one storage stay so.

        A tensor without elements has no place, and stays where it is.
        """
        if not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        if storage.data_ptr() not in self._storages:
            place = self._take(storage.nbytes())
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,))
            self._region.torch((count,), tensor.dtype, byte_offset=place).copy_(whole)
            self._storages[storage.data_ptr()] = place
        place = self._storages[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()
        return self._region.torch(tensor.shape, tensor.dtype, byte_offset=place, strides=tensor.stride())

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, gap: int) -> Room:
        """Memory for one gradient, with `gap` elements behind each row of heads."""
        strides = list(dense_strides(shape))
        # The steps over rows, and over batches where there are any.
        for index in range(len(shape) - 2):
            strides[index] = (shape[-2] * shape[-1] + gap) * (shape[1] if index == 0 and len(shape) == 4 else 1)
        count = shape[0] * strides[0] + gap if len(shape) > 1 else shape[0]
        place = self._take(count * dtype.itemsize)
        whole = self._region.torch((count,), dtype, byte_offset=place)
        view = self._region.torch(shape, dtype, byte_offset=place, strides=strides)
        return Room(whole, view)

    def bytes(self) -> NDArray[np.uint8]:
        """A copy of all that was laid so far."""
        return self._region.tensor((self._end // 4,), "fp32", byte_offset=0).view(np.uint8).copy()

    def _take(self, nbytes: int) -> int:
        place, self._end = self._end, self._end + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._end > self._region.nbytes:
            raise MemoryError(f"a request of {self._end} bytes is too large for this shelf")
        return place


class Room:
    """Memory for one gradient: NaN where its elements come, GAP around them."""

    def __init__(self, whole: Tensor, view: Tensor) -> None:
        self._whole = whole
        self.view = view
        whole.fill_(GAP)
        view.fill_(float("nan"))

    def gaps_are_untouched(self) -> bool:
        """Whether nothing was written outside the elements."""
        rest = self._whole.clone()
        rest.as_strided(self.view.shape, self.view.stride(), 0).fill_(GAP)
        return bool((rest == GAP).all())


class Ways:
    """A client a way, and a region of each kind for the last of them. To be used by one thread at a time."""

    def __init__(self, target: str) -> None:
        self._clients = {
            Way.UNARY: Client(target, inline_nbytes=ALWAYS_NBYTES),
            Way.STREAM: Client(target, inline_nbytes=NEVER_NBYTES),
            Way.REGION: Client(target),
        }
        self._regions = {kind: self._clients[Way.REGION].region(REGION_NBYTES, kind=kind) for kind in Kind}

    def close(self) -> None:
        """Ends regions and connections."""
        for client in self._clients.values():
            client.close()

    def __enter__(self) -> Ways:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def client(self, way: Way) -> Client:
        """The client that sends everything this way."""
        return self._clients[way]

    def shelf(self, kind: Kind) -> Shelf:
        """The region of a kind, to be laid full anew."""
        return Shelf(self._regions[kind])

    def ask(self, inputs: Inputs, way: Way, *, kind: Kind = Kind.MEMFD, gap: int = 0) -> Gradients[Tensor]:
        """The answer, in memory of its own. By region: inputs as they lie, gradients to where NaN was, `gap` apart.

        Raises what the client raises, and AssertionError where the server wrote what it may not.
        """
        if way is Way.REGION:
            return self.ask_by_region(inputs, self.shelf(kind), gap=gap)
        return self._clients[way].backward(**arguments(inputs), timeout_s=TIMEOUT_S)

    def ask_by_region(self, inputs: Inputs, shelf: Shelf, *, gap: int = 0) -> Gradients[Tensor]:
        """See `ask`; `shelf` is empty."""
        given = arguments(inputs)
        given |= _each(TENSORS, given, shelf.lay)
        before = shelf.bytes()
        shapes = {role: given[source] for role, source in GRADIENTS.items() if given[source] is not None}
        rooms = {
            role: shelf.room(tuple(source.shape), inputs.grad_dtype or source.dtype, gap)
            for role, source in shapes.items()
            if source.numel()
        }
        given |= {role: room.view for role, room in rooms.items()}
        answer = self._clients[Way.REGION].backward(**given, timeout_s=TIMEOUT_S)
        assert np.array_equal(shelf.bytes()[: before.size], before), "the server wrote to an input"
        touched = [role for role, room in rooms.items() if not room.gaps_are_untouched()]
        assert not touched, f"the server wrote between the rows of {touched}"
        copies = {role: getattr(answer, role) for role in GRADIENTS}
        copies |= {role: room.view.clone() for role, room in rooms.items()}
        return Gradients(**copies, report=answer.report)


def _each(names: tuple[str, ...], given: Mapping[str, Any], do: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {name: do(given[name]) for name in names if given[name] is not None}
