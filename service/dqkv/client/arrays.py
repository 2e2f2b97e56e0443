"""Arrays of a caller, numpy's or torch's, and the host memory behind them; torch is imported only where it comes in."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dqkv import errors
from dqkv.tensor import NUMPY_DTYPES, DType, Tensor

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Any
"""A numpy.ndarray or a torch.Tensor."""
HostArray: TypeAlias = NDArray[Any]
"""Elements in this process's memory, any strides; bf16 is ml_dtypes.bfloat16."""

_DTYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
_TORCH_NAMES = {"torch.bfloat16": DType.BF16, "torch.float16": DType.FP16, "torch.float32": DType.FP32}


@dataclass(frozen=True, slots=True)
class Home:
    """What kind of arrays a caller works with: numpy's where `device` is None, else torch's on that device."""

    device: torch.device | None = None

    @staticmethod
    def of(array: Array) -> Home:
        """The kind of this array."""
        return Home(array.device) if is_torch(array) else Home()

    def give(self, host: HostArray) -> Array:
        """A result as this kind of array; without a copy where the memory is the host's."""
        if self.device is None:
            return host
        tensor = as_torch(host)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


def refuse_meta(role: str, tensor: torch.Tensor) -> None:
    """Raises DTypeMismatch for a torch tensor that has a shape but no values."""
    if tensor.device.type == "meta":
        raise errors.DTypeMismatch(f"{role} is on the meta device, must be a tensor that holds values", field=role)


def is_torch(array: Array) -> bool:
    """Whether this is a torch tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_on_host(array: Array) -> bool:
    """Whether this array's elements lie in this process's memory."""
    return not is_torch(array) or array.device.type == "cpu"


def refuse_unwritable(role: str, tensor: torch.Tensor) -> None:
    """Raises what is wrong with a torch tensor, on any device, as memory that values are written to.

    DTypeMismatch where it holds no values or has no strides, OptionInvalid where it is a view that negates another.
    """
    refuse_meta(role, tensor)
    _refuse_layout(role, tensor)
    if tensor.is_neg():
        raise errors.OptionInvalid(f"{role} is memory that cannot be written: a view that negates another", field=role)


def mark_written(tensor: torch.Tensor) -> None:
    """Tells autograd that the memory of a torch tensor changes: what saved it may no longer take it as it was."""
    import torch

    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def host_array(role: str, array: Array) -> HostArray:
    """The host memory of an array of any shape and strides, copied only from another device.

    Raises DTypeMismatch for a dtype other than bf16, fp16, fp32, or for what is no array, holds no values, or holds
    them otherwise than in memory with strides (a masked array, a nested or distributed tensor).
    """
    if is_torch(array):
        array = _torch_host(role, array)
    if not isinstance(array, np.ndarray):
        raise errors.DTypeMismatch(
            f"{role} is a {type(array).__name__}, must be a numpy array or a torch tensor", field=role
        )
    if isinstance(array, np.ma.MaskedArray):
        raise errors.DTypeMismatch(f"{role} is a masked array, whose mask would be lost: fill it first", field=role)
    if array.dtype not in _DTYPES:
        raise _unknown_dtype(role, array.dtype)
    return array


def host_tensor(role: str, array: Array) -> Tensor[HostArray]:
    """An array as a tensor of the vocabulary: described as dense, with the strides left to the array itself."""
    host = host_array(role, array)
    return Tensor.dense(_DTYPES[host.dtype], host.shape, host)


def as_torch(host: HostArray) -> torch.Tensor:
    """The same memory as a torch tensor on the CPU."""
    import torch

    if host.dtype == NUMPY_DTYPES[DType.BF16]:
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


def of_kind(dtype: Any, host: HostArray) -> Array:
    """The same memory as the kind of array that a dtype is of: torch's for torch's, else numpy's."""
    return as_torch(host) if str(dtype) in _TORCH_NAMES and not isinstance(dtype, str) else host


def raw_view(host: HostArray) -> memoryview:
    """The memory of an array, strides kept, in a format that memoryview knows."""
    return host.view(np.uint16 if host.dtype.itemsize == 2 else np.uint32).data


def dense_bytes(host: HostArray) -> memoryview:
    """The elements in row-major order as bytes; copied only where they do not lie so."""
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8).data


def dtype_of(field: str, dtype: Any) -> DType:
    """The DType of a DType, its name ("bf16"), or a numpy or torch dtype. Raises DTypeMismatch."""
    if isinstance(dtype, str):
        found = DType(dtype) if dtype in set(DType) else None
    elif str(dtype) in _TORCH_NAMES:
        found = _TORCH_NAMES[str(dtype)]
    else:
        try:
            found = _DTYPES.get(np.dtype(dtype))
        except TypeError:
            found = None
    if found is None:
        raise _unknown_dtype(field, dtype)
    return found


def integers(field: str, values: Array) -> tuple[int, ...] | None:
    """Offsets or lengths from a sequence or a one-dimensional array. Raises OffsetsInvalid or SequsedInvalid."""
    if values is None:
        return None
    kind = errors.SequsedInvalid if field.startswith("seqused") else errors.OffsetsInvalid
    try:
        array = np.asarray(values.detach().cpu().numpy() if is_torch(values) else values)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        raise kind(f"{field} is no array, must hold integers in one dimension", field=field) from None
    if array.ndim != 1:
        raise kind(f"{field} has {array.ndim} dimensions, must have one", field=field)
    if array.size and array.dtype.kind not in "iu":
        raise kind(f"{field} holds {array.dtype} values, must hold integers", field=field)
    return tuple(array.tolist())


def _torch_host(role: str, tensor: torch.Tensor) -> HostArray:
    import torch

    refuse_meta(role, tensor)
    plain = tensor.detach()
    _refuse_layout(role, plain)
    if str(plain.dtype) not in _TORCH_NAMES:
        raise _unknown_dtype(role, plain.dtype)
    if plain.device.type != "cpu":
        # What is expanded over a dimension crosses once, not once an index.
        thin = plain[tuple(slice(None) if stride else slice(0, 1) for stride in plain.stride())]
        plain = thin.cpu().expand(plain.shape)
    plain = plain.resolve_conj().resolve_neg()
    try:
        if plain.dtype is torch.bfloat16:
            return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return plain.numpy()
    except RuntimeError:
        # Distributed, traced and other tensors that only stand for memory, which may lie elsewhere in part.
        raise errors.DTypeMismatch(
            f"{role} is a {type(tensor).__name__} without memory of its own, must be a plain tensor", field=role
        ) from None


def _refuse_layout(role: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise errors.DTypeMismatch(f"{role} is a nested tensor, must be one packed or dense tensor", field=role)
    if str(tensor.layout) != "torch.strided":
        raise errors.DTypeMismatch(f"{role} has layout {tensor.layout}, must be strided", field=role)


def _unknown_dtype(field: str, dtype: Any) -> errors.DTypeMismatch:
    order = " in this machine's byte order" if isinstance(dtype, np.dtype) and not dtype.isnative else ""
    return errors.DTypeMismatch(f"{field} is {dtype}, must be bf16, fp16 or fp32{order}", field=field)
