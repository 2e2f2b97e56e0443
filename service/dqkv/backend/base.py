"""What a device is and what it is asked: the values that cross from the server's front to a device's process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dqkv.memory.block import InBlock
from dqkv.problem import Arch, Problem
from dqkv.tensor import DType, Tensor


class DeviceState(StrEnum):
    """Whether a device takes work."""

    STARTING = "starting"
    OK = "ok"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInfo:
    """A device as its process sees it: name ("cpu:0"), the archs it runs, best first, and the input dtypes it takes."""

    name: str
    archs: tuple[Arch, ...]
    dtypes: tuple[DType, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One backward for a device: the problem with its tensors in blocks, and where each gradient goes.

    `gradients` has every role of `problem.gradients`, any strides; each is written in full.
    """

    task_id: int
    problem: Problem[InBlock]
    gradients: dict[str, Tensor[InBlock]]
