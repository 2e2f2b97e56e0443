"""dqkv.attention against torch autograd in float64: forward here, backward on a real server, over the options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from rig.server import Running
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import dqkv
from dqkv import errors


@dataclass(frozen=True, kw_only=True)
class Sizes:
    batch_size: int = 2
    seqlen_q: int = 37
    seqlen_k: int = 53
    num_heads_q: int = 4
    num_heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int = 24
    lengths: tuple[tuple[int, int], ...] = ()
    sink: bool = False
    lse_grad: bool = False
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Sizes(),
    "causal": Sizes(options={"causal": True}),
    "causal_blind_rows": Sizes(seqlen_q=60, seqlen_k=21, options={"causal": True}),
    "window": Sizes(options={"window": (9, 4)}),
    "window_sink_tokens": Sizes(seqlen_k=90, options={"window": (11, 0), "sink_token_length": 3}),
    "negative_window": Sizes(options={"window": (20, -3)}),
    "empty_window": Sizes(options={"window": (-5, 0)}),
    "softcap": Sizes(options={"softcap": 2.0, "causal": True}),
    "scale": Sizes(options={"softmax_scale": -0.3}),
    "one_key_head": Sizes(num_heads_kv=1),
    "sink": Sizes(sink=True, options={"causal": True}),
    "lse_grad": Sizes(lse_grad=True, options={"causal": True}),
    "sink_lse_grad_softcap": Sizes(sink=True, lse_grad=True, options={"softcap": 3.0, "window": (15, 2)}),
    "deterministic": Sizes(options={"deterministic": True}),
    "used_rows": Sizes(options={"seqused_q": [37, 5], "seqused_k": [50, 0]}),
    "packed": Sizes(lengths=((20, 31), (0, 7), (33, 5), (4, 0)), options={"causal": True}),
    "packed_sink_lse_grad": Sizes(lengths=((20, 31), (9, 9)), sink=True, lse_grad=True),
}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[dqkv.Client]:
    with dqkv.Client(server.target, timeout_s=120) as one:
        yield one


def leaves(sizes: Sizes, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and, where there is one, sink: the same values rounded to dtype, as leaves."""
    generator = torch.Generator().manual_seed(7)
    q_rows: tuple[int, ...] = (sizes.batch_size, sizes.seqlen_q)
    k_rows: tuple[int, ...] = (sizes.batch_size, sizes.seqlen_k)
    if sizes.lengths:
        q_rows, k_rows = (sum(q for q, _ in sizes.lengths),), (sum(k for _, k in sizes.lengths),)
    shapes = [
        (*q_rows, sizes.num_heads_q, sizes.head_dim),
        (*k_rows, sizes.num_heads_kv, sizes.head_dim),
        (*k_rows, sizes.num_heads_kv, sizes.head_dim_v),
        *([(sizes.num_heads_q,)] if sizes.sink else []),
    ]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)


def plain_attention(
    sizes: Sizes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as autograd knows it, in the dtype of its inputs."""
    outs, lses = [], []
    if sizes.lengths:
        q_lengths, k_lengths = ([pair[side] for pair in sizes.lengths] for side in (0, 1))
        parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    else:
        parts = zip(q, k, v, strict=True)
    for index, (one_q, one_k, one_v) in enumerate(parts):
        used_q = sizes.options.get("seqused_q", [len(one_q)] * 9)[index]
        used_k = sizes.options.get("seqused_k", [len(one_k)] * 9)[index]
        out, lse = sequence(sizes, one_q[:used_q], one_k[:used_k], one_v[:used_k], sink)
        rest = len(one_q) - used_q
        outs.append(torch.cat([out, out.new_zeros(rest, *out.shape[1:])]))
        lses.append(torch.cat([lse, lse.new_full((rest, lse.shape[1]), float("-inf"))]))
    if sizes.lengths:
        return torch.cat(outs), torch.cat(lses).T
    return torch.stack(outs), torch.stack(lses).transpose(1, 2)


def sequence(
    sizes: Sizes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    options, group = sizes.options, sizes.num_heads_q // sizes.num_heads_kv
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1))
    scores = scores * options.get("softmax_scale", sizes.head_dim**-0.5)
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    i = torch.arange(len(q))[:, None] + len(k) - len(q)
    j = torch.arange(len(k))[None, :]
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if right is not None:
        seen &= j <= i + right
    if left is not None:
        seen &= (j >= i - left) | (j < options.get("sink_token_length", 0))
    # A finite mask keeps autograd of a blind row free of NaN; such a row is cut out below.
    scores = scores.masked_fill(~seen, -1e30)
    columns = [scores] if sink is None else [scores, sink[:, None, None].expand(-1, len(q), 1)]
    every = torch.cat(columns, -1)
    alive = seen.any(1) if sink is None else torch.ones(len(q), dtype=torch.bool)
    if not every.shape[-1]:
        return q.new_zeros(len(q), q.shape[1], v.shape[-1]), q.new_full((len(q), q.shape[1]), float("-inf"))
    lse = torch.logsumexp(every, -1)
    weights = torch.exp(scores - lse[..., None]) * (seen & alive[:, None])
    out = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(group, 1))
    return out, torch.where(alive, lse, lse.new_full((), float("-inf"))).T


def given_options(sizes: Sizes) -> dict[str, Any]:
    if not sizes.lengths:
        return sizes.options
    q, k = ([pair[side] for pair in sizes.lengths] for side in (0, 1))
    return sizes.options | {"cu_seqlens_q": offsets(q), "cu_seqlens_k": offsets(k)}


def loss_of(sizes: Sizes, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    loss = (out.double() * torch.randn(out.shape, generator=generator)).sum()
    if sizes.lse_grad:
        weights = torch.randn(lse.shape, generator=generator)
        loss = loss + (lse.double() * weights)[torch.isfinite(lse)].sum()
    return loss


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_out_lse_and_gradients_are_autograds(
    client: dqkv.Client, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    sizes = CASES[name]
    given = leaves(sizes, dtype)
    sink = given[3] if sizes.sink else None
    out, lse = dqkv.attention(*given[:3], client=client, sink=sink, return_lse=True, **given_options(sizes))
    loss_of(sizes, out, lse).backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in given]
    want_out, want_lse = plain_attention(sizes, *exact[:3], exact[3] if sizes.sink else None)
    loss_of(sizes, want_out, want_lse).backward()
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    for leaf, one in zip(given, exact, strict=True):
        scale = max(1.0, float(one.grad.abs().max()))
        torch.testing.assert_close(leaf.grad.double(), one.grad, rtol=tolerance, atol=tolerance * scale)


def test_a_gradient_into_lse_alone(client: dqkv.Client) -> None:
    q, k, v = leaves(Sizes(), torch.float32)
    _, lse = dqkv.attention(q, k, v, client=client, return_lse=True)
    lse.sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    plain_attention(Sizes(), *exact, None)[1].sum().backward()
    torch.testing.assert_close(q.grad.double(), exact[0].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k.grad.double(), exact[1].grad, rtol=1e-5, atol=1e-5)
    assert not v.grad.any()


def test_a_sum_sends_an_expanded_gradient(client: dqkv.Client) -> None:
    q, k, v = leaves(Sizes(), torch.float32)
    dqkv.attention(q, k, v, client=client).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    plain_attention(Sizes(), *exact, None)[0].sum().backward()
    for leaf, one in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), one.grad, rtol=1e-5, atol=1e-5)


def test_views_of_one_projection_are_differentiated_through(client: dqkv.Client) -> None:
    wide = torch.randn(2, 20, 3 * 4 * 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    q, k, v = wide.unflatten(-1, (3, 4, 16)).unbind(2)
    dqkv.attention(q, k, v, client=client, causal=True).square().sum().backward()
    exact = wide.detach().double().requires_grad_()
    sizes = Sizes(num_heads_kv=4, head_dim=16, head_dim_v=16, options={"causal": True})
    plain_attention(sizes, *exact.unflatten(-1, (3, 4, 16)).unbind(2), None)[0].square().sum().backward()
    torch.testing.assert_close(wide.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_unrounded_gradients_reach_a_leaf_that_takes_them(client: dqkv.Client) -> None:
    grads = {}
    for grad_dtype in (torch.bfloat16, torch.float32):
        q, k, v = leaves(Sizes(), torch.bfloat16)
        q.grad_dtype = grad_dtype
        dqkv.attention(q, k, v, client=client, grad_dtype=grad_dtype).square().sum().backward()
        assert q.grad.dtype == grad_dtype
        grads[grad_dtype] = q.grad
    assert not torch.equal(grads[torch.float32], grads[torch.bfloat16].float())
    assert torch.equal(grads[torch.float32].bfloat16(), grads[torch.bfloat16])


def test_autocast_does_not_round_the_forward(client: dqkv.Client) -> None:
    q, k, v = leaves(Sizes(), torch.float32)
    want = dqkv.attention(q, k, v, client=client)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dqkv.attention(q, k, v, client=client), want)


def small_leaves() -> list[torch.Tensor]:
    return leaves(Sizes(batch_size=1, seqlen_q=9, seqlen_k=9, head_dim_v=32), torch.float32)[:3]


@pytest.mark.parametrize("changed", ["q", "k", "v", "out", "lse"])
def test_what_changed_since_the_forward_is_never_differentiated_by(client: dqkv.Client, changed: str) -> None:
    q, k, v = (leaf * 1 for leaf in small_leaves())
    out, lse = dqkv.attention(q, k, v, client=client, return_lse=True)
    target = {"q": q, "k": k, "v": v, "out": out, "lse": lse}[changed]

    def change_and_differentiate() -> None:
        target.mul_(2)
        out.sum().backward()

    with pytest.raises(RuntimeError, match="inplace"):
        change_and_differentiate()


def test_memory_that_gradients_are_written_to_is_never_differentiated_by_as_it_was(client: dqkv.Client) -> None:
    q, k, v = (leaf.detach() for leaf in small_leaves())
    memory, weight = torch.ones_like(q), torch.ones_like(q).requires_grad_()
    loss = (weight * memory).sum()
    client.backward(q, k, v, v[:, :, :1].expand_as(q), out=q, dq=memory)
    assert not torch.equal(memory, torch.ones_like(q))
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_memory_of_inference_is_written_too(client: dqkv.Client) -> None:
    q, k, v = (leaf.detach() for leaf in small_leaves())
    with torch.inference_mode():
        memory = torch.zeros_like(q)
    client.backward(q, k, v, torch.ones_like(q), out=q, dq=memory)
    assert torch.equal(memory, client.backward(q, k, v, torch.ones_like(q), out=q).dq)


def test_a_graph_is_walked_as_often_as_asked(client: dqkv.Client) -> None:
    once, twice = small_leaves(), small_leaves()
    dqkv.attention(*once, client=client).sum().backward()
    loss = dqkv.attention(*twice, client=client).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    for one, two in zip(once, twice, strict=True):
        assert one.grad is not None
        assert two.grad is not None
        torch.testing.assert_close(two.grad, 2 * one.grad)


def test_a_gradient_of_the_gradient_is_refused(client: dqkv.Client) -> None:
    q, k, v = small_leaves()
    upstream = torch.ones_like(q).requires_grad_()
    (dq,) = torch.autograd.grad(dqkv.attention(q, k, v, client=client), q, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (dq.square().sum() + q.square().sum()).backward()


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_one_tensor_alone_may_ask_for_its_gradient(client: dqkv.Client, wanted: str) -> None:
    every = dict(zip("qkv", small_leaves(), strict=True))
    dqkv.attention(**every, client=client).sum().backward()
    alone = {role: leaf.detach().requires_grad_(role == wanted) for role, leaf in every.items()}
    dqkv.attention(**alone, client=client).sum().backward()
    for role, leaf in alone.items():
        assert (leaf.grad is None) == (role != wanted)
    assert torch.equal(alone[wanted].grad, every[wanted].grad)


def test_a_tensor_in_all_three_places_gets_the_sum(client: dqkv.Client) -> None:
    shared = leaves(Sizes(num_heads_kv=4), torch.float32)[0]
    dqkv.attention(shared, shared, shared, client=client, causal=True).sum().backward()
    apart = [shared.detach().clone().requires_grad_() for _ in range(3)]
    dqkv.attention(*apart, client=client, causal=True).sum().backward()
    torch.testing.assert_close(shared.grad, sum(leaf.grad for leaf in apart))


@pytest.mark.parametrize("wrap", ["checkpoint", "compile"])
def test_recomputed_and_compiled_forwards_get_the_same_gradients(client: dqkv.Client, wrap: str) -> None:
    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return dqkv.attention(*tensors, client=client, causal=True) * 2

    plain, wrapped = small_leaves(), small_leaves()
    attend(*plain).sum().backward()
    if wrap == "checkpoint":
        out = checkpoint(attend, *wrapped, use_reentrant=False)
    else:
        out = torch.compile(attend, backend="eager")(*wrapped)
    out.sum().backward()
    for one, other in zip(plain, wrapped, strict=True):
        assert torch.equal(one.grad, other.grad)


def test_transforms_that_would_pass_the_server_by_are_refused(client: dqkv.Client) -> None:
    q, k, v = (leaf.detach() for leaf in small_leaves())
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: dqkv.attention(x, k, v, client=client).sum())(q)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.vmap(lambda x: dqkv.attention(x, k, v, client=client))(q[None])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_tensors_that_only_stand_for_memory_are_refused_by_name(client: dqkv.Client) -> None:
    q, k, v = (leaf.detach() for leaf in small_leaves())
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(k)
    for role, tensor in (("k", fake), ("k", torch.nested.nested_tensor([k[0], k[0]]))):
        with pytest.raises(errors.DTypeMismatch) as refused:
            client.backward(q, **{role: tensor}, v=v, dout=q, out=q)
        assert refused.value.field == role


def test_what_does_not_fit_is_refused_in_the_forward(client: dqkv.Client) -> None:
    q, k, v = leaves(Sizes(), torch.float32)
    with pytest.raises(errors.ShapeMismatch):
        dqkv.attention(q, k[:, :, :, :16], v, client=client)
    with pytest.raises(errors.DTypeMismatch):
        dqkv.attention(q.double(), k.double(), v.double(), client=client)
    with pytest.raises(errors.DTypeMismatch, match="torch tensor"):
        dqkv.attention(q.detach().numpy(), k, v, client=client)
    with pytest.raises(errors.ShapeMismatch):
        dqkv.attention(q[0, 0], k, v, client=client)


@pytest.mark.parametrize(("name", "near"), [("window_size", "window"), ("dropout_p", ""), ("is_causal", "causal")])
def test_an_unknown_argument_is_refused_with_the_nearest_known_one(client: dqkv.Client, name: str, near: str) -> None:
    q, k, v = leaves(Sizes(), torch.float32)
    with pytest.raises(TypeError) as caught:
        dqkv.attention(q, k, v, client=client, **{name: 1})
    assert str(caught.value).startswith(f"attention() has no argument {name!r}; the nearest is '{near}")


async def test_a_client_that_cannot_wait_is_refused_at_the_call() -> None:
    q, k, v = leaves(Sizes(), torch.float32)
    async with dqkv.AsyncClient("127.0.0.1:1") as one:
        for wrong in (one, None, "127.0.0.1:1"):
            with pytest.raises(errors.OptionInvalid, match=r"must be a dqkv\.Client") as caught:
                dqkv.attention(q, k, v, client=wrong)
            assert caught.value.field == "client"


@pytest.mark.parametrize("role", ["q", "k", "v", "dout", "out", "dq"])
def test_a_tensor_without_values_is_refused_by_name(client: dqkv.Client, role: str) -> None:
    q = torch.zeros(1, 8, 2, 16)
    given = dict.fromkeys(("q", "k", "v", "dout", "out"), q) | {role: q.to("meta")}
    with pytest.raises(errors.DTypeMismatch, match="meta device") as caught:
        client.backward(**given)
    assert caught.value.field == role
    if role in ("q", "k", "v"):
        with pytest.raises(errors.DTypeMismatch, match="meta device"):
            dqkv.attention(*(given[name] for name in ("q", "k", "v")), client=client)


def test_a_long_forward_holds_a_tile_of_scores_at_a_time() -> None:
    import resource

    from dqkv.client.forward import attend
    from dqkv.client.request import Request

    rows = 16384
    q = torch.randn(rows, 2, 8, generator=torch.Generator().manual_seed(1))
    ends = [0, rows]
    problem = Request(
        q=q, k=q, v=q, dout=q, delta=torch.zeros(2, rows), cu_seqlens_q=ends, cu_seqlens_k=ends, window=(64, 0)
    ).problem()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attend(problem, q, q, q, None)
    # All scores are 2 GiB in fp32.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 256
