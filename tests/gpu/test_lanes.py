"""An accumulator in the order of tensor memory becomes rows: exactly, on a device that has no tensor memory."""

from __future__ import annotations

import pytest
import torch
from assembly import lanes_keys
from gpu_rig import Gpu

from dqkv_kernels.tiles import tile_for

pytestmark = pytest.mark.gpu

SEQLENS = (130, 5, 256, 1)
HEADS = 3
SCALE = 0.3
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BEHIND = 7.0
"""What lies behind each row of dq, and has to stay."""


@pytest.mark.parametrize("narrower", [0, 8, 24])
@pytest.mark.parametrize("key", lanes_keys(), ids=lambda key: key.name)
def test_lanes_become_scaled_rows(gpu: Gpu, key, narrower):
    tile, device = tile_for(key.arch, key.target, key.head_dim, key.head_dim_v), gpu.device
    tiles = [-(-seqlen // tile.tile_m) for seqlen in SEQLENS]
    padded_rows, rows = sum(tiles) * tile.tile_m, sum(SEQLENS)
    table, padded, row = [], 0, 0
    for seqlen, count in zip(SEQLENS, tiles, strict=True):
        table.append((0, row, seqlen, 0, 0, 0, padded, 0))
        padded, row = padded + count * tile.tile_m, row + seqlen
    generator = torch.Generator(device).manual_seed(0)
    sums = torch.randn(HEADS, padded_rows, tile.head_dim, device=device, generator=generator)
    # four columns of a row side by side, then those of the next row, then the next four columns
    blocks = sums.view(HEADS, -1, tile.tile_m, tile.head_dim // 4, 4).transpose(2, 3)
    accumulator = blocks.reshape(HEADS, padded_rows * tile.head_dim).contiguous()
    width, dtype = tile.head_dim - narrower, TORCH_DTYPES[key.dtype]
    memory = torch.full((1, rows, HEADS, tile.head_dim + 8), BEHIND, dtype=dtype, device=device)
    sequences = torch.tensor(table, dtype=torch.int64, device=device)
    gpu.artifacts.load(key)(accumulator, memory[..., :width], sequences, max(tiles), padded_rows, SCALE)
    torch.cuda.synchronize()
    owned = torch.cat([sums[:, a[6] : a[6] + a[2]] for a in table], 1).transpose(0, 1)
    assert torch.equal(memory[0, :, :, :width], (owned[..., :width] * SCALE).to(dtype))
    assert (memory[..., width:] == BEHIND).all()
    gpu.record.facts["lanes_exact"] = True
