"""One attention-backward problem in numbers: what is drawn, what is asked, what must hold of the answer."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field, replace
from typing import Literal

Dtype = Literal["bf16", "fp16", "fp32"]
Expect = Literal["MATCH", "INVALID_ARGUMENT", "MATCH_OR_INVALID"]
LseScope = Literal["LOCAL", "GLOBAL"]


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which keys a query sees; None is unbounded, both bounds are inclusive.

    Query i of seqlen_q sees key j of seqlen_k when diagonal - left <= j <= diagonal + right, where diagonal is
    i + seqlen_k - seqlen_q. The first `sink_token_length` keys stay visible to queries whose left bound has
    passed them; the right bound still holds.
    """

    left: int | None = None
    right: int | None = None
    sink_token_length: int = 0


@dataclass(frozen=True, kw_only=True)
class Ring:
    """The request holds one of `count` equal key blocks; softmax_lse and out are those of all of them."""

    block: int
    count: int


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """How each tensor lies in memory, by the names of `layouts.LAYOUTS`; None is row-major without gaps."""

    q: str | None = None
    k: str | None = None
    v: str | None = None
    dout: str | None = None
    out: str | None = None


@dataclass(frozen=True, kw_only=True)
class Override:
    """What the request says in place of the truth, so that it must be refused; None leaves the truth."""

    cu_seqlens_k: tuple[int, ...] | None = None
    max_seqlen_k: int | None = None
    k_width: int | None = None
    dout_dtype: Dtype | None = None
    softmax_lse_dtype: Dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem, its options and its expectations.

    A side is packed when seqlens_* lists the allocated rows of each sequence; tail_* adds rows behind the
    last offset that belong to no sequence. seqused_* says how many of the allocated rows count. `sink` is the
    dtype of one logit a query head in the softmax denominator. A row that sees no key has out 0 and softmax_lse
    -inf (or the sink), and nothing flows from it into dq, dk, dv.

    expect: MATCH is finite and within `error_budget`; INVALID_ARGUMENT is a clear refusal before any launch;
    MATCH_OR_INVALID is either of them.
    checks: ZERO_ROWS, some rows must be exactly 0; BITWISE, repeated calls agree bit for bit; BITWISE_DKDV,
    dk and dv do so even where it was not asked for; NO_HANG, bound the call in time; BIAS, the mean signed error
    stays well under the root mean square.
    """

    name: str
    theme: str
    note: str = ""
    batch_size: int = 1
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int = 2
    num_heads_kv: int
    head_dim: int = 64
    head_dim_v: int
    dtype: Dtype = "bf16"
    seqlens_q: tuple[int, ...] | None = None
    seqlens_k: tuple[int, ...] | None = None
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    tail_q: int = 0
    tail_k: int = 0
    softmax_scale: float | None = None
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    sink_token_length: int = 0
    softcap: float = 0.0
    deterministic: bool = False
    sink: Dtype | None = None
    sink_add: float = 0.0
    dlse: bool = False
    dlse_mul: float = 1.0
    ring: Ring | None = None
    q_mul: float = 1.0
    k_mul: float = 1.0
    v_mul: float = 1.0
    neg_target: float | None = None
    special: tuple[str, ...] = ()
    layouts: Layouts = field(default_factory=Layouts)
    override: Override = field(default_factory=Override)
    expect: Expect = "MATCH"
    checks: tuple[str, ...] = ()
    big: Literal["batch", "swa"] | None = None

    @property
    def seed(self) -> int:
        """Seed of everything drawn: a function of the name alone, so that other dtypes draw the same."""
        return zlib.crc32(self.name.encode()) & 0x7FFFFFFF

    @property
    def scale(self) -> float:
        """The softmax scale in force."""
        return 1.0 / math.sqrt(self.head_dim) if self.softmax_scale is None else float(self.softmax_scale)

    @property
    def window(self) -> Window:
        """The window in force: causal is right = 0, also where another right is given with it."""
        right = 0 if self.causal else self.window_right
        return Window(left=self.window_left, right=right, sink_token_length=self.sink_token_length)

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def lse_scope(self) -> LseScope:
        """GLOBAL where the softmax runs over more keys than the request holds."""
        return "LOCAL" if self.ring is None else "GLOBAL"

    @property
    def is_refused(self) -> bool:
        """Whether the only right answer is a refusal."""
        return self.expect == "INVALID_ARGUMENT"


def with_dtype(case: Case, dtype: Dtype) -> Case:
    """The same draws rounded to another dtype; a sink beside fp32 inputs is fp32 too."""
    if dtype == case.dtype:
        return case
    return replace(case, dtype=dtype, sink="fp32" if case.sink and dtype == "fp32" else case.sink)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Another way to ask for the gradients of a case.

    dtype: of the inputs; None is the case's. grad_dtype: of the answer; None is the inputs'.
    """

    name: str
    reason: str
    dtype: Dtype | None = None
    grad_dtype: Dtype | None = None
    row_sums: Literal["out", "delta"] = "out"
    softmax_lse: Literal["given", "absent"] = "given"

    def of(self, case: Case) -> Case:
        """The case in this variant's input dtype."""
        return case if self.dtype is None else with_dtype(case, self.dtype)

    def answer_dtype(self, case: Case) -> Dtype:
        """The dtype that dq, dk and dv must have."""
        return self.grad_dtype or self.dtype or case.dtype


AS_IS = Variant(name="as_is", reason="what the case says")
VARIANTS = (
    AS_IS,
    Variant(name="delta", row_sums="delta", reason="delta saves a caller a fifth of the inbound bytes"),
    Variant(name="no_lse", softmax_lse="absent", reason="the server recomputes softmax_lse with its own kernel"),
    Variant(name="grad_fp32", grad_dtype="fp32", reason="partial sums that a caller adds up are not rounded"),
    Variant(name="fp32", dtype="fp32", reason="fp32 inputs leave no 16-bit rounding to hide an error in"),
)


def variants(case: Case) -> tuple[Variant, ...]:
    """The ways to ask for a case: a refused or big one only as it is, GLOBAL ones never without softmax_lse."""
    if case.is_refused or case.big:
        return (AS_IS,)
    local = case.lse_scope == "LOCAL"
    return tuple(variant for variant in VARIANTS if local or variant.softmax_lse == "given")
