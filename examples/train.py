"""A small GPT trained twice from the same start: with the backward of attention here, and on a server.

    python examples/train.py 127.0.0.1:50051 [--steps 50]

It learns Python's own source byte by byte. Both losses are printed and drawn side by side; they may differ by what
rounding to bf16 does, and the exit status is 1 where they differ by more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import dqkv

LAYERS, HEADS, HEAD_DIM = 2, 4, 32
WIDTH = HEADS * HEAD_DIM
BATCH, SEQLEN = 8, 128
BYTES = 256
LEARNING_RATE = 1e-3
TOLERANCE = 0.05
"""Between the two losses of a step, which begin at ln(256) = 5.5."""
BAR = 50

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (batch, rows, heads, head_dim) in bf16 to out, likewise: causal attention."""


def here(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Forward and backward by PyTorch."""
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def on(client: dqkv.Client) -> Attend:
    """Forward here, backward on the server of a client."""
    return lambda q, k, v: dqkv.attention(q, k, v, client=client, causal=True)


class Block(nn.Module):
    """Attention and a layer of neurons, each added to what comes in."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.neurons = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, rows, WIDTH) to the same."""
        qkv = self.qkv(self.before(x)).view(*x.shape[:2], 3, HEADS, HEAD_DIM).bfloat16()
        x = x + self.out(self.attend(*qkv.unbind(2)).flatten(2).float())
        return x + self.neurons(self.between(x))


class Gpt(nn.Module):
    """Bytes to the logits of the bytes that follow."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, given: Tensor) -> Tensor:
        """(batch, rows) to (batch, rows, BYTES)."""
        return self.head(self.blocks(self.byte(given) + self.place.weight[: given.shape[1]]))


def losses(attend: Attend, steps: int) -> Iterator[float]:
    """The loss of each step, from the same start and of the same text in every call."""
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    model = Gpt(attend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        starts = torch.randint(len(text) - SEQLEN - 1, (BATCH, 1), generator=chance)
        rows = text[starts + torch.arange(SEQLEN + 1)]
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def main() -> None:
    """Trains, prints a line a step, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="host:port")
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps is {given.steps}, must be at least 1")
    widest = 0.0
    print("step    here  server")
    with dqkv.Client(given.server) as client:
        both = zip(losses(here, given.steps), losses(on(client), given.steps), strict=True)
        for step, (one, other) in enumerate(both):
            widest = max(widest, abs(one - other))
            print(f"{step:>4}{one:>8.4f}{other:>8.4f}  {'#' * round(other * BAR / 6)}", flush=True)
    print(f"the losses differ by {widest:.4f} at most, of {TOLERANCE} that they may")
    raise SystemExit(int(widest > TOLERANCE))


if __name__ == "__main__":
    main()
