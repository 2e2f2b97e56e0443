"""Kernels that compute the backward of attention; `backward` is the entry, and what it offers is offered here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dqkv_kernels.backward import attention_backward, softmax_statistics, supports

__all__ = ["attention_backward", "softmax_statistics", "supports"]


def __getattr__(name: str) -> object:
    # Not at import: torch takes seconds, and who only looks at artifacts needs none of it.
    if name in __all__:
        from dqkv_kernels import backward

        return getattr(backward, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
