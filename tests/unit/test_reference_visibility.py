"""Regions hold every visible pair of a sequence once and no hidden key alone, for any window."""

from __future__ import annotations

import random

import pytest
import torch

from dqkv.problem import Window
from dqkv_kernels import visibility
from dqkv_kernels.visibility import Band, Cover, Region

CPU = torch.device("cpu")


def pairs(seqlen_q, seqlen_k, window):
    """int (seqlen_q, seqlen_k): the definition, element by element."""
    seen = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
    for i in range(seqlen_q):
        diagonal = i + seqlen_k - seqlen_q
        for j in range(seqlen_k):
            right_holds = window.right is None or j <= diagonal + window.right
            left_holds = window.left is None or j >= diagonal - window.left or j < window.sink_token_length
            seen[i, j] = right_holds and left_holds
    return seen


def random_window(chance):
    return Window(
        left=chance.choice([None, chance.randint(-12, 40)]),
        right=chance.choice([None, 0, chance.randint(-12, 40)]),
        sink_token_length=chance.choice([0, 0, chance.randint(0, 40)]),
    )


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(visibility, "ROWS_UNBOUNDED_LEFT", 7)
    monkeypatch.setattr(visibility, "ROWS_BOUNDED_LEFT", (3, 6))
    monkeypatch.setattr(visibility, "FULL_KEYS_LEAST", 4)
    monkeypatch.setattr(visibility, "KEYS_PER_REGION", 5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(8))
def test_regions_hold_each_visible_pair_once(seed):
    chance = random.Random(seed)
    for _ in range(150):
        seqlen_q, seqlen_k, window = chance.randint(0, 30), chance.randint(0, 30), random_window(chance)
        band, found = Band.of(seqlen_q, seqlen_k, window), torch.zeros(seqlen_q, seqlen_k, dtype=torch.int32)
        step = chance.choice([100, 11])
        for q0 in range(0, seqlen_q, step):
            for region in band.regions(q0, min(q0 + step, seqlen_q)):
                mask = band.mask(region, CPU)
                if region.cover is Cover.FULL:
                    assert mask.all(), (window, region)
                if region.cover is Cover.CAUSAL:
                    assert torch.equal(mask, torch.ones_like(mask).tril()), (window, region)
                found[region.q0 : region.q1, region.k0 : region.k1] += mask
        assert torch.equal(found, pairs(seqlen_q, seqlen_k, window)), (seqlen_q, seqlen_k, window)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_that_see_a_key(seed):
    chance = random.Random(seed)
    for _ in range(200):
        seqlen_q, seqlen_k, window = chance.randint(0, 20), chance.randint(0, 20), random_window(chance)
        seeing = pairs(seqlen_q, seqlen_k, window).any(1).nonzero().flatten().tolist()
        want = (seeing[0], seeing[-1] + 1) if seeing else (0, 0)
        assert Band.of(seqlen_q, seqlen_k, window).rows == want, (seqlen_q, seqlen_k, window)


@pytest.mark.usefixtures("small_blocks")
def test_keys_that_nobody_sees_are_in_no_region():
    band = Band.of(10, 40, Window(left=3, right=0))
    regions = list(band.regions(0, 10))
    assert min(region.k0 for region in regions) == 27
    assert max(region.k1 for region in regions) == 40


def test_a_long_window_has_few_equal_masks_and_narrow_regions():
    band = Band.of(100_000, 100_000, Window(left=64, right=0))
    regions = list(band.regions(40_000, 44_096))
    assert len({band.mask_key(region) for region in regions}) == 1
    assert max(region.k1 - region.k0 for region in regions) <= 256 + 64
    assert all(torch.equal(band.mask(region, CPU), band.mask(regions[0], CPU)) for region in regions[:3])


def test_bounds_far_outside_are_no_bounds():
    band = Band.of(90, 140, Window(left=10**6, right=10**6))
    assert list(band.regions(0, 90)) == [Region(q0=0, q1=90, k0=0, k1=140, cover=Cover.FULL)]
