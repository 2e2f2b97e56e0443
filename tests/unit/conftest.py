"""What unit tests share: hypothesis' examples, the same in every run and as slow as the machine is; one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

# No deadline for an example, no check of how long they take to make, and nothing that depends on a seed of the day.
settings.load_profile("ci")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices gain nothing from threads that wait for each other on a busy machine."""
    import torch  # not there where the client is tested with numpy alone

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
