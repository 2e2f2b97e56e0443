"""The vocabulary's dtypes as torch's: the one place that knows both."""

from __future__ import annotations

import torch

from dqkv.tensor import DType

TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
