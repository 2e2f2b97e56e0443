"""Which keys a query sees, for one element, for a tile, and as ranges of tiles.

Query i of a sequence sees key j when i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right, or when
j < sink_tokens and only the right bound holds. The host keeps left, right and sink_tokens within int32 even after a
length is added: a bound beyond every length is the same as none.
"""

import cutlass
from cutlass import Int32


class Mask:
    """The window of one sequence over tiles of (tile_m queries, tile_n keys)."""

    def __init__(self, sequence, window, tile_m, tile_n):
        left, right, sink_tokens = window
        self.seqlen_q, self.seqlen_k = sequence.seqlen_q, sequence.seqlen_k
        # of key position minus query position: lowest and highest that is seen
        self.low = self.seqlen_k - self.seqlen_q - left
        self.high = self.seqlen_k - self.seqlen_q + right
        self.sink_tokens = sink_tokens
        self.tile_m, self.tile_n = tile_m, tile_n


# Functions, not methods: a call on an object inside a dynamic branch would make the branch carry the object.


def sees(mask, i, j):
    """Whether query i sees key j (both within the sequence), as a Boolean."""
    distance = j - i
    return (distance <= mask.high) & ((distance >= mask.low) | (j < mask.sink_tokens)) & (j < mask.seqlen_k)


def is_full(mask, m, n):
    """Whether every query row of tile m (padding too) sees every key of tile n: no element needs a test."""
    first_i, first_j = m * mask.tile_m, n * mask.tile_n
    last_i, last_j = first_i + (mask.tile_m - 1), first_j + (mask.tile_n - 1)
    right = last_j - first_i <= mask.high
    left = (first_j - last_i >= mask.low) | (last_j < mask.sink_tokens)
    return right & left & (last_j < mask.seqlen_k)


def first_m(mask, n):
    """The first tile of queries that sees any key of tile n."""
    return cutlass.max(n * mask.tile_n - mask.high, Int32(0)) // mask.tile_m


def end_m(mask, n):
    """One past the last tile of queries that sees any key of tile n; not above the number of tiles."""
    tiles = (mask.seqlen_q + (mask.tile_m - 1)) // mask.tile_m
    last_i = n * mask.tile_n + (mask.tile_n - 1) - mask.low
    end = cutlass.max(last_i + mask.tile_m, Int32(0)) // mask.tile_m
    sinks = n * mask.tile_n < mask.sink_tokens
    return Int32(cutlass.select_(sinks, tiles, cutlass.min(end, tiles)))


def first_n(mask, m):
    """The first tile of keys, sink tokens aside, that any query of tile m sees."""
    return cutlass.max(m * mask.tile_m + mask.low, Int32(0)) // mask.tile_n


def end_n(mask, m):
    """One past the last tile of keys that any query of tile m sees; not above the number of tiles."""
    tiles = (mask.seqlen_k + (mask.tile_n - 1)) // mask.tile_n
    last_j = m * mask.tile_m + (mask.tile_m - 1) + mask.high
    return cutlass.min(cutlass.max(last_j + mask.tile_n, Int32(0)) // mask.tile_n, tiles)


def sink_tiles(mask):
    """How many tiles of keys hold sink tokens."""
    return (mask.sink_tokens + (mask.tile_n - 1)) // mask.tile_n


def tiles_after(mask, m, n):
    """How many tiles of keys after n see tile m of the queries, given that n sees it: n's turn, last tile first."""
    first, end, sinks = first_n(mask, m), end_n(mask, m), sink_tiles(mask)
    window = end - cutlass.max(first, n + 1)
    beyond = cutlass.min(cutlass.min(sinks, first), end) - (n + 1)
    return cutlass.max(window, Int32(0)) + cutlass.max(beyond, Int32(0))
