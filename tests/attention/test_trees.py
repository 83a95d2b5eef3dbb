"""Trees against every tree written out, projective and not, and where matrices are nearly singular (G3)."""

import functools
import itertools

import pytest
import torch
from oracles import EXACT
from oracles import exact as exact
from torch.autograd import gradcheck
from torch.testing import assert_close

from regard.attention import trees

pytestmark = pytest.mark.usefixtures("exact")

LENGTHS = (6, 5, 4, 3, 2, 1, 0)


def climbs(heads, word):
    """The word, its head, that one's head and so on, up to the root or to where it goes round."""
    found = [word]
    while (word := heads[word]) not in found:
        found.append(word)
    return found


@functools.cache
def write_out(words, projective):
    """Every tree (trees, words) of so many words: the head of each, the root is its own."""
    found = []
    for heads in itertools.product(range(words), repeat=words):
        roots = [word for word in range(words) if heads[word] == word]
        if len(roots) != 1 or any(climbs(heads, word)[-1] != roots[0] for word in range(words)):
            continue
        arcs = [sorted(pair) for pair in enumerate(heads)]  # projective: a head is above all between it and its word
        if projective and any(
            heads[word] not in climbs(heads, inner)
            for word, (low, high) in enumerate(arcs)
            for inner in range(low + 1, high)
        ):
            continue
        found.append(heads)
    return torch.tensor(found, dtype=torch.long).view(-1, words)


PARTITION = {True: trees.eisner, False: trees.matrix_tree}
MARGINALS = {True: trees.projective_marginals, False: trees.tree_marginals}
BEST = {True: trees.best_projective, False: trees.best_tree}
BOTH = pytest.mark.parametrize("projective", [True, False], ids=["projective", "all"])


@BOTH
def test_every_tree_written_out(projective):
    scores, lengths = 2 * torch.randn(len(LENGTHS), 6, 6), torch.tensor(LENGTHS)
    total, found = PARTITION[projective](scores, lengths), MARGINALS[projective](scores, lengths)
    best = BEST[projective](scores, lengths)
    assert not found[-1].any()  # of no words
    assert total[-1] == 0
    for row, words in enumerate(LENGTHS[:-1]):
        every = write_out(words, projective)
        values = scores[row, torch.arange(words), every].sum(1)
        shares = values.softmax(0)
        wanted = torch.zeros(6, 6)
        for word in range(words):
            wanted[word].index_add_(0, every[:, word], shares)
        assert_close(total[row], values.logsumexp(0), **EXACT)
        assert_close(found[row], wanted, **EXACT)
        assert best[row, :words].tolist() == every[values.argmax()].tolist()
        entropy = total[row] - (found[row] * scores[row]).sum()
        assert_close(entropy, torch.special.entr(shares).sum(), **EXACT)


@BOTH
def test_without_scores_the_partition_counts(projective):
    """Of n words there are n^(n - 1) trees (Cayley); of the projective ones, 1, 2, 7, 30, 143, 728 (OEIS A006013)."""
    counts = [1.0, 2, 7, 30, 143, 728] if projective else [float(n ** (n - 1)) for n in range(1, 7)]
    total = PARTITION[projective](torch.zeros(6, 6, 6), torch.arange(1, 7))
    assert_close(total.exp(), torch.tensor(counts), rtol=1e-12, atol=0)


@BOTH
def test_gradients(projective):
    lengths = torch.tensor([4, 2, 0])
    scores = torch.randn(3, 4, 4, requires_grad=True)
    assert gradcheck(lambda arcs: PARTITION[projective](arcs, lengths), (scores,))
    assert gradcheck(lambda arcs: MARGINALS[projective](arcs, lengths), (scores,))


@BOTH
def test_the_gradient_of_the_partition_is_the_marginals(projective):
    scores, lengths = torch.randn(3, 5, 5, requires_grad=True), torch.tensor([5, 3, 1])
    (gradient,) = torch.autograd.grad(PARTITION[projective](scores, lengths).sum(), scores)
    assert_close(gradient, MARGINALS[projective](scores, lengths), **EXACT)


@BOTH
def test_what_is_behind_the_end_does_not_matter(projective):
    lengths = torch.tensor([5, 3, 1])
    scores = torch.randn(3, 8, 8)
    other = scores.clone()
    for row, length in enumerate(lengths.tolist()):
        other[row, length:] = 50.0
        other[row, :, length:] = 50.0
    for function in (PARTITION[projective], MARGINALS[projective], BEST[projective]):
        found = [function(one, lengths) for one in (scores, other)]
        if function is BEST[projective]:
            found = [one.masked_fill(torch.arange(8) >= lengths[:, None], 0) for one in found]
        assert_close(*found, **EXACT)
    narrow = MARGINALS[projective](scores[:, :5, :5], lengths)
    assert_close(MARGINALS[projective](scores, lengths)[:, :5, :5], narrow, **EXACT)


@BOTH
def test_marginals_while_nothing_is_learned(projective):
    scores, lengths = torch.randn(2, 5, 5), torch.tensor([5, 4])
    wanted = MARGINALS[projective](scores, lengths)
    with torch.inference_mode():
        found = MARGINALS[projective](scores * 1, lengths * 1)
        best = BEST[projective](scores * 1, lengths * 1)
    assert_close(found, wanted, **EXACT)
    assert_close(best, BEST[projective](scores, lengths), **EXACT)


@pytest.mark.parametrize(("projective", "words"), [(True, 100), (False, 400)])
def test_long_sentences_in_half_the_digits(projective, words):
    scores, lengths = 5 * torch.randn(2, words, words), torch.tensor([words, words - 7])
    wanted, found = MARGINALS[projective](scores, lengths), MARGINALS[projective](scores.float(), lengths)
    assert_close(found.double(), wanted, rtol=0, atol=1e-3)
    assert_close(found.sum(-1).double(), (torch.arange(words) < lengths[:, None]).double(), rtol=0, atol=1e-3)


def test_scores_far_apart_do_not_make_the_matrix_singular():
    scores, lengths = 60 * torch.randn(4, 30, 30), torch.full((4,), 30)
    found = trees.tree_marginals(scores, lengths)
    assert_close(found.sum(-1), torch.ones(4, 30), rtol=0, atol=1e-6)
    assert found.min() > -1e-9


def test_a_cycle_within_a_cycle():
    """Greedy heads go round twice, one round inside another; compared with every tree."""
    generator = torch.Generator().manual_seed(3)
    every = write_out(6, False)
    for _ in range(50):
        scores = torch.randint(-9, 10, (6, 6), generator=generator).double()
        scores += 1e-3 * torch.rand(6, 6, generator=generator, dtype=torch.float64)  # no two trees are alike
        values = scores[torch.arange(6), every].sum(1)
        found = trees.best_tree(scores[None], torch.tensor([6]))[0]
        assert found.tolist() == every[values.argmax()].tolist()
