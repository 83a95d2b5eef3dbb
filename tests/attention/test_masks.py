"""Masks by hand."""

import pytest
import torch

from regard.attention.masks import causal, distance, padding, window


def test_padding_shows_the_keys_that_exist():
    mask = padding(torch.tensor([0, 2, 3]), 3)
    assert mask.shape == (3, 1, 1, 3)
    assert mask[:, 0, 0].int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("queries", "keys", "rows"),
    [(3, 3, [[1, 0, 0], [1, 1, 0], [1, 1, 1]]), (2, 5, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]), (1, 3, [[1, 1, 1]])],
)
def test_causal_hides_what_lies_ahead_of_a_last_query_at_the_last_key(queries, keys, rows):
    assert causal(queries, keys).int().tolist() == rows


@pytest.mark.parametrize(
    ("queries", "keys", "width", "rows"),
    [
        (3, 3, 0, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        (4, 4, 1, [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]),
        (2, 5, 1, [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]),
    ],
)
def test_window_reaches_both_sides(queries, keys, width, rows):
    assert window(queries, keys, width).int().tolist() == rows


def test_distance_is_how_far_ahead_a_key_stands():
    assert distance(2, 3).tolist() == [[-1, 0, 1], [-2, -1, 0]]


def test_masks_join():
    mask = padding(torch.tensor([2, 5]), 5) & causal(3, 5)
    assert mask.shape == (2, 1, 3, 5)
    assert mask[0, 0].int().tolist() == [[1, 1, 0, 0, 0]] * 3
    assert torch.equal(mask[1, 0], causal(3, 5))
    assert torch.equal(causal(5, 5) & causal(5, 5).mT, window(5, 5, 0))


@pytest.mark.parametrize("make", [causal, distance, lambda *sizes: window(*sizes[:2], 1, sizes[2])])
def test_masks_are_made_where_they_are_used(make):
    assert make(2, 3, torch.device("meta")).device.type == "meta"
