"""The kernels' own masks on the host: the source of device/mask.py, run with plain numbers for the compiler's."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

import dqkv_kernels

SOURCE = Path(dqkv_kernels.__file__).parent / "device" / "mask.py"


@cache
def masks() -> ModuleType:
    """The module: Mask, sees, is_full, first_m and the others, on integers and integer tensors."""
    numbers: Any = ModuleType("cutlass")
    numbers.max, numbers.min, numbers.Int32 = max, min, int
    numbers.select_ = lambda condition, one, other: one if condition else other
    module = ModuleType("masks")
    with patch.dict(sys.modules, {"cutlass": numbers}):
        exec(compile(SOURCE.read_text(), str(SOURCE), "exec"), module.__dict__)
    return module


def seen(mask: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """bool (queries, keys): which of these positions see which; int64 tensors of positions in the sequence."""
    answer: torch.Tensor = masks().sees(mask, queries[:, None], keys[None, :])
    return answer
