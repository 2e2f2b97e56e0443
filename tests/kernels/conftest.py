"""Kernels built once for all compile gates, kept under build/ and built again only when their source changed."""

from __future__ import annotations

import pytest
from assembly import DIRECTORY, gated_keys

from dqkv_kernels.build import Built, build
from dqkv_kernels.key import KernelKey


@pytest.fixture(scope="session")
def built() -> dict[KernelKey, Built]:
    """What became of each gated key; needs the compiler, which is an extra."""
    pytest.importorskip("cutlass", reason="the compile extra is not installed")
    return {outcome.key: outcome for outcome in build(gated_keys(), DIRECTORY, processes=2)}
