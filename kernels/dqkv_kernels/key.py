"""The compile-time facts of one kernel, as a frozen value that its artifact is named after."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class Kernel(StrEnum):
    """The kernels of a chain, in the order in which they run."""

    STATISTICS = "statistics"
    PREPROCESS = "preprocess"
    MAIN_LOOP = "main_loop"
    POSTPROCESS = "postprocess"


@dataclass(frozen=True, kw_only=True, order=True)
class KernelKey:
    """Everything a kernel is compiled for; whatever is not here is a run-time value.

    arch: the family of the main loop (80, 90, 100). target: what machine code is made for, as tiles.py names it.
    dtype: bf16 or fp16 of the inputs; of dq for the postprocess, where fp32 occurs too. head_dim, head_dim_v: padded
    widths. A fact that does not concern a kernel is None: head_dim_v (statistics), softcap (preprocess, postprocess),
    grad_dtype (all but the main loop).
    """

    kernel: Kernel
    arch: int
    target: str
    dtype: str
    head_dim: int
    head_dim_v: int | None = None
    softcap: bool | None = None
    grad_dtype: str | None = None

    @property
    def name(self) -> str:
        """The name of the artifact, without a suffix."""
        width = f"{self.head_dim}" if self.head_dim_v is None else f"{self.head_dim}x{self.head_dim_v}"
        parts = [self.kernel.value, f"arch{self.arch}", self.target, self.dtype, width]
        if self.softcap is not None:
            parts.append("softcap" if self.softcap else "plain")
        if self.grad_dtype is not None:
            parts.append(f"grad_{self.grad_dtype}")
        return "-".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The facts as plain values, for a manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Self:
        """The key that `as_dict` came from. Raises TypeError or ValueError when the facts are not a key's."""
        return cls(**{**facts, "kernel": Kernel(facts["kernel"])})
