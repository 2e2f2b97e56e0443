"""Ring attention whose backward runs on servers: four processes, each with a quarter of the sequence.

    python examples/ring.py 127.0.0.1:50051 [more servers] [--seqlen 512] [--full]

Each process keeps its queries; keys and values go round. The forward merges blocks by their softmax_lse. In the
backward a process sends each block that comes by to its server, with the statistics of the whole sequence: what comes
back are the block's parts of the gradients, in fp32, and they add up to the whole. dK and dV go round with their block
and are whole when it is home again. At the end every process holds its gradients against float64.
"""

from __future__ import annotations

import argparse
import math
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import dqkv

PROCESSES = 4
HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 64
TOLERANCE = 0.01
"""Of the largest gradient: inputs in bf16 are exact here, sums are in fp32, P and dS may be rounded to 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """What all processes agree on. servers: addresses, used in turn."""

    servers: tuple[str, ...]
    seqlen: int
    causal: bool
    port: int


def whole(ring: Ring) -> list[Tensor]:
    """q, k, v, dout (1, seqlen, heads, head_dim) in bf16, the same in every process."""
    torch.manual_seed(0)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(1, ring.seqlen, count, HEAD_DIM).bfloat16() for count in heads]


def mask_of(ring: Ring, rank: int, owner: int) -> dict[str, bool] | None:
    """How the queries of `rank` see the keys of `owner`, as options of a request; None is not at all."""
    if ring.causal and owner > rank:
        return None
    return {"causal": ring.causal and owner == rank}


def pass_on(tensors: list[Tensor], rank: int) -> tuple[list[Tensor], list[dist.Work]]:
    """Starts sending tensors to the next process and receiving as many from the one before."""
    arriving = [torch.empty_like(tensor) for tensor in tensors]
    following, before = (rank + 1) % PROCESSES, (rank - 1) % PROCESSES
    works = [dist.isend(tensor, following) for tensor in tensors]
    works += [dist.irecv(tensor, before) for tensor in arriving]
    return arriving, works


def forward(ring: Ring, rank: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out like q, and softmax_lse (1, heads, rows) over all keys."""
    out = torch.zeros(q.shape, dtype=torch.float32)
    lse = torch.full((1, HEADS, q.shape[1]), -math.inf)
    for step in range(PROCESSES):
        arriving, works = pass_on([k, v], rank)
        options = mask_of(ring, rank, (rank - step) % PROCESSES)
        if options is not None:
            part, part_lse = block_forward(q, k, v, options["causal"])
            merged = torch.logaddexp(lse, part_lse)
            keep, add = ((x - merged).exp().transpose(1, 2).unsqueeze(-1) for x in (lse, part_lse))
            out, lse = out * keep + part * add, merged
        for work in works:
            work.wait()
        k, v = arriving
    return out.bfloat16(), lse


def block_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of one block of keys: out in fp32, and its softmax_lse."""
    group = q.shape[2] // k.shape[2]
    queries, keys, values = (t.float().transpose(1, 2) for t in (q, k, v))
    keys, values = (t.repeat_interleave(group, 1) for t in (keys, values))
    logits = queries @ keys.transpose(2, 3) / math.sqrt(HEAD_DIM)
    if causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~seen, -math.inf)
    return (logits.softmax(-1) @ values).transpose(1, 2), logits.logsumexp(-1)


def backward(
    ring: Ring, rank: int, client: dqkv.Client, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this process's rows, in fp32."""
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
    dq = torch.zeros(q.shape, dtype=torch.float32)
    dk, dv = (torch.zeros(k.shape, dtype=torch.float32) for _ in range(2))
    for step in range(PROCESSES):
        # the block goes on while the server works on it; its gradients follow when they are known
        arriving, works = pass_on([k, v], rank)
        options = mask_of(ring, rank, (rank - step) % PROCESSES)
        if options is not None:
            part = client.backward(
                q, k, v, dout, delta=delta, softmax_lse=lse, lse_scope="global", grad_dtype="fp32", **options
            )
            dq, dk, dv = dq + part.dq, dk + part.dk, dv + part.dv
        sums, more = pass_on([dk, dv], rank)
        for work in [*works, *more]:
            work.wait()
        (k, v), (dk, dv) = arriving, sums
    return dq, dk, dv


def exact(ring: Ring) -> list[Tensor]:
    """dq, dk, dv of the whole sequence in float64."""
    q, k, v, dout = whole(ring)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    group = HEADS // KEY_HEADS
    queries, keys, values = (t.transpose(1, 2) for t in leaves)
    logits = queries @ keys.repeat_interleave(group, 1).transpose(2, 3) / math.sqrt(HEAD_DIM)
    if ring.causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    out = (logits.softmax(-1) @ values.repeat_interleave(group, 1)).transpose(1, 2)
    return list(torch.autograd.grad(out, leaves, dout.double()))


def run(rank: int, ring: Ring) -> None:
    """One process of the ring; prints its errors, and fails where one is too large."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{ring.port}", rank=rank, world_size=PROCESSES)
    server = ring.servers[rank % len(ring.servers)]
    mine = [t.chunk(PROCESSES, 1)[rank].contiguous() for t in whole(ring)]
    q, k, v, dout = mine
    with dqkv.Client(server) as client:
        out, lse = forward(ring, rank, q, k, v)
        found = backward(ring, rank, client, q, k, v, dout, out, lse)
    wanted = exact(ring)
    errors = {
        name: ((gradient.double() - want.chunk(PROCESSES, 1)[rank]).abs().max() / want.abs().max()).item()
        for name, gradient, want in zip(("dq", "dk", "dv"), found, wanted, strict=True)
    }
    verdict = "right" if max(errors.values()) <= TOLERANCE else "WRONG"
    print(f"process {rank} by {server}:", *(f"{n} {e:.1e}" for n, e in errors.items()), verdict, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if verdict != "right":
        raise SystemExit(1)


def main() -> None:
    """Starts the processes; exit status 1 where a gradient is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", help="host:port")
    parser.add_argument("--seqlen", type=int, default=512, help=f"a multiple of {PROCESSES}")
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    given = parser.parse_args()
    if given.seqlen < PROCESSES or given.seqlen % PROCESSES:
        parser.error(f"--seqlen is {given.seqlen}, must be a positive multiple of {PROCESSES}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ring = Ring(servers=tuple(given.servers), seqlen=given.seqlen, causal=not given.full, port=port)
    print(f"largest error of each gradient, over its largest value; {PROCESSES} processes, {ring.seqlen} tokens")
    mp.spawn(run, (ring,), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
