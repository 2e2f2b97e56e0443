"""Examples that hypothesis makes up: the same in every run, and as slow as the machine is."""

from __future__ import annotations

from hypothesis import settings

# No deadline for an example, no check of how long they take to make, and nothing that depends on a seed of the day.
settings.load_profile("ci")
