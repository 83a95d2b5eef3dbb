"""What remains of a map in strips, against the same map as one tensor."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from regard.attention.sparse import Pattern, sparse_mask
from regard.explain.strips import TILES, TOP, Blocks, Strip, summarize, tile_size

PATTERNS = [
    Pattern(4, 1, None, 1, 2),
    Pattern(4, 1, 4),
    Pattern(3, 1, None, 2, 1, causal=True),
    Pattern(5, 1, 5, causal=True),
]


def dense_mask(pattern, n):
    places = torch.arange(n)
    return sparse_mask(pattern, places, places, n)


def gather(weights, mask):
    """A strip that holds what a mask shows of each row, with a slot more that holds nothing."""
    most = int(mask.sum(-1).max()) + 1
    places = torch.full((len(mask), most), -1)
    for row, seen in enumerate(mask):
        places[row, most - int(seen.sum()) :] = seen.nonzero().flatten()
    kept = weights.gather(-1, places.clamp(min=0).expand(len(weights), -1, -1)) * (places >= 0)
    return Strip(kept, places)


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (130, 40), (7, 300), (261, 259)])
def test_a_summary_is_of_the_whole_map_however_it_is_cut(rows, columns):
    weights = torch.randn(3, rows, columns).mul(3).softmax(-1)
    high, wide = tile_size(rows, TILES), tile_size(columns, TILES)
    far = (torch.arange(columns) - torch.arange(rows)[:, None]).abs()
    bits = -(weights * weights.log2()).sum(-1).mean(-1)
    for step in (1, 50, rows):
        found = summarize((Strip(weights[:, at : at + step]) for at in range(0, rows, step)), (3, rows, columns))
        assert_close(torch.tensor(found.entropy), bits)
        assert_close(torch.tensor(found.distance), (weights * far).sum(-1).mean(-1), rtol=1e-4, atol=1e-4)
        assert_close(found.sums, torch.ones(3, rows))
        assert torch.equal(found.picture, F.max_pool2d(weights, (high, wide), ceil_mode=True))
        assert max(found.picture.shape[1:]) <= TILES
        assert torch.equal(found.weights, weights.topk(min(TOP, columns)).values)
        assert torch.equal(weights.gather(-1, found.columns.long()), found.weights)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("n", [9, 150])
def test_gathered_strips_are_the_dense_ones(pattern, n):
    mask = dense_mask(pattern, n)
    weights = torch.randn(2, n, n).masked_fill(~mask, -math.inf).softmax(-1)
    strips = [gather(weights[:, at : at + 37], mask[at : at + 37]) for at in range(0, n, 37)]
    assert torch.equal(torch.cat([strip.dense(n) for strip in strips], 1), weights)
    gathered, dense = (summarize(parts, (2, n, n)) for parts in (strips, [Strip(weights)]))
    assert_close(gathered.entropy, dense.entropy, rtol=1e-4, atol=1e-5)
    assert_close(gathered.distance, dense.distance, rtol=1e-4, atol=1e-4)
    for name in ("picture", "weights", "sums"):
        assert_close(getattr(gathered, name), getattr(dense, name))
    some = gathered.weights > 0
    assert_close(weights.gather(-1, gathered.columns.long())[some], gathered.weights[some])


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("n", [1, 12, 31])
def test_blocks_say_what_a_pattern_shows(pattern, n):
    blocks, mask = Blocks(pattern, n), dense_mask(pattern, n)
    assert torch.equal(blocks.mask(), mask)
    for high, wide in itertools.product((1, 3, 8), repeat=2):
        tiles = F.max_pool2d(mask[None].float(), (high, wide), ceil_mode=True)[0] > 0
        found = blocks.mask(high, wide)
        assert found.shape == tiles.shape
        assert not (tiles & ~found).any(), "what is seen is never hatched"
    listed = torch.zeros(n, n, dtype=torch.bool)
    for own, row in enumerate(blocks.seen()):
        for one in row:
            size = pattern.block
            listed[own * size : (own + 1) * size, one * size : (one + 1) * size] = True
    assert not (mask & ~listed).any()
    assert listed.sum() == blocks.count()
    if not pattern.causal and pattern.width is None:
        assert torch.equal(listed, mask)
