"""How marginals come about: every structure of a short text, written out again by its definition."""

import itertools
import math

import pytest
import torch
from every_task import a_source, made
from oracles import shaken
from rich.console import Console
from taggers import batch, enumerate_taggings, tagger
from torch.testing import assert_close

from regard.cli import verbs
from regard.errors import InputError
from regard.explain import marginals
from regard.explain.look import look
from regard.explain.marginals import (
    Marginal,
    Potentials,
    TooLongError,
    add_segments,
    add_taggings,
    add_trees,
    balance_row,
    list_choices,
    list_trees,
    trace_row,
)
from regard.inference.predictor import Predictor

STRUCTURED = [
    *("rnn with segments", "rnn with trees", "transformer with segments", "transformer with trees", "tagger"),
    *("tagger over features", "classifier with matchings", "lineup"),
]
CLOSE = {"atol": 1e-6, "rtol": 0.0}


def looked_at(kind, source=None, target=None):
    """A look at a model of drawn weights."""
    task, model = made(kind)
    torch.manual_seed(5)
    return look(Predictor(task, shaken(model)), source or a_source(task), target=target)


# --- lists -----------------------------------------------------------------------------------------------------------


def test_choices_are_all_there_is_to_choose():
    assert list(map(tuple, list_choices(3, 2).tolist())) == list(itertools.product(range(3), repeat=2))
    assert list_choices(3, 0).shape == (1, 0)


@pytest.mark.parametrize("words", [1, 2, 3, 4, 5, 6])
def test_there_are_as_many_trees_as_there_should_be(words):
    """n ** (n - 1) rooted trees (Cayley), and binom(3n - 2, n - 1) / n of them whose arcs do not cross."""
    every, projective = (list_trees(words, projective=only) for only in (False, True))
    assert len(every) == words ** (words - 1)
    assert len(projective) == math.comb(3 * words - 2, words - 1) // words
    assert len(every.unique(dim=0)) == len(every)
    assert {*map(tuple, projective.tolist())} <= {*map(tuple, every.tolist())}


# --- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STRUCTURED)
def test_sums_are_the_weights_of_the_map(kind):
    found, traced = looked_at(kind, *(["abcd", "bc"] if "trees" in kind else [])), 0
    for one in found.maps:
        for head, row in itertools.product(*map(range, one.weights.shape[:2])):
            match trace_row(found, row, head, one.name):
                case Marginal() as marginal:
                    assert_close(marginal.sums.float(), one.weights[head, row], **CLOSE)
                    assert (marginal.complete, marginal.covered) == (True, pytest.approx(1))
                    traced += 1
                case Potentials(scores, own, columns):
                    assert_close((scores + own + columns).exp().float(), one.weights[head, row], **CLOSE)
                    traced += 1
                case None:
                    assert one.kind in ("self", "cross")
    assert traced


@pytest.mark.parametrize("structure", ["crf", "memm", "softmax"])
def test_taggings_are_the_likeliest_and_their_sums_the_marginals(structure):
    model = tagger(structure)
    given = batch(model, [4])
    every = enumerate_taggings(model, given, 0)
    best = sorted(every.items(), key=lambda pair: -pair[1])[:8]
    with torch.no_grad():
        chain = model.chain(given)
    for row in range(4):
        found = add_taggings(*chain, row)
        assert list(map(tuple, found.structures.tolist())) == [path for path, _ in best]
        assert_close(found.chances, torch.tensor([chance for _, chance in best]).double(), **CLOSE)
        wanted = [sum(chance for path, chance in every.items() if path[row] == tag) for tag in range(3)]
        assert_close(found.sums, torch.tensor(wanted).double(), **CLOSE)
        assert found.picks.long().argmax(1).tolist() == [path[row] for path, _ in best]


def test_too_many_taggings_are_covered_in_part(monkeypatch):
    """The same taggings are the likeliest, with the same probabilities; only they are added up."""
    model = tagger()
    with torch.no_grad():
        chain = model.chain(batch(model, [5]))
    whole = add_taggings(*chain, 2)
    monkeypatch.setattr(marginals, "TAGGINGS", 3**5 - 1)
    part = add_taggings(*chain, 2)
    assert (whole.total, whole.complete, part.total, part.complete) == (243, True, 243, False)
    assert torch.equal(part.structures, whole.structures)
    assert_close(part.chances, whole.chances, **CLOSE)
    assert part.covered == pytest.approx(float(part.chances.sum()))
    assert part.covered < 0.999
    assert_close(part.sums, (part.chances[:, None] * part.picks).sum(0), **CLOSE)


def test_what_is_forbidden_is_not_shown():
    unary, moves = torch.zeros(1, 2, 2), torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]])
    found = add_taggings(unary, moves, torch.tensor([2]), 0)
    assert sorted(found.structures.tolist()) == [[0, 0], [1, 0]]


def test_a_matching_is_balanced_by_hand():
    """Two and two: the potentials are those that Sinkhorn's rounds arrive at; hidden keys have none."""
    scores, seen = torch.tensor([[1.0, 0.0, 9.0], [0.5, 2.0, 9.0]]).double(), torch.ones(2, 3, dtype=torch.bool)
    seen[:, 2] = False
    plan = scores[:, :2].exp()
    for _ in range(500):
        plan = plan / plan.sum(1, keepdim=True)
        plan = plan / plan.sum(0, keepdim=True)
    for row in range(2):
        found = balance_row(scores, seen, row)
        assert_close((found.scores + found.row + found.columns).exp()[:2], plan[row], **CLOSE)
        assert float(found.columns[:2].sum()) == pytest.approx(0)
        assert float(found.columns[2]) == -math.inf


# --- too long, and the terminal --------------------------------------------------------------------------------------


def test_long_texts_are_refused():
    with pytest.raises(TooLongError, match=r"too long to enumerate its trees \(at most 6 words, it has 7\)"):
        add_trees(torch.zeros(7, 7), 0, projective=True)
    seen = torch.ones(20, dtype=torch.bool)
    with pytest.raises(TooLongError, match=r"too long to enumerate its sets of keys \(at most 12 words, it has 20\)"):
        add_segments(torch.zeros(20), seen, torch.zeros(2, 2))
    seen[12:] = False
    found = add_segments(torch.zeros(20), seen, torch.zeros(2, 2))
    assert (found.total, found.sums.tolist()) == (2**12, [*[0.5] * 12, *[0.0] * 8])


def test_rows_that_are_not_there():
    found = looked_at("tagger over features")
    for row in (-1, 99):
        with pytest.raises(InputError, match=f"row {row} was asked for; chain has 2 rows"):
            trace_row(found, row)


def shown(monkeypatch, *given):
    """What `regard look --token` prints."""
    console = Console(width=120)
    monkeypatch.setattr(verbs, "out", console)
    monkeypatch.setattr(verbs, "say", console.print)
    with console.capture() as said:
        verbs.show_maps(*given)
    return said.get()


def test_the_terminal_shows_taggings_and_sums(monkeypatch):
    found = looked_at("tagger over features")
    said = shown(monkeypatch, found, "chain", None, 1)
    weights, _, tags = found.label("chain")
    assert "the 4 likeliest of 4 taggings" in said
    assert "all 4 taggings added up" in said
    for tag, weight in zip(tags, weights[1].tolist(), strict=True):
        assert [tag, f"{weight:.4f}", f"{weight:.4f}"] in [line.split() for line in said.splitlines()]
    monkeypatch.setattr(marginals, "TAGGINGS", 3)
    said = shown(monkeypatch, found, "chain", None, 1)
    assert "too long to enumerate all taggings" in said
    assert "these 4 cover 1.0000 of the probability" in said


def test_the_terminal_shows_trees_sets_and_potentials(monkeypatch):
    found = looked_at("rnn with trees", "abc", "bc")
    name = next(one.name for one in found.maps if one.kind == "tree")
    said = shown(monkeypatch, found, name, None, 0)
    (row,) = [line.split() for line in said.splitlines() if line.split()[1:2] == ["has"] or "→" in line][1:2]
    assert len(row) == 2 + len(found.tokens["key"])
    assert sum(part.startswith("*") for part in row) == 1
    assert "weight" in said
    found = looked_at("rnn with trees", "abcdefgh", "bc")
    said = shown(monkeypatch, found, name, None, 0)
    assert "too long to enumerate its trees (at most 6 words" in said
    assert "query · key" in said
    found = looked_at("rnn with segments", "ab", "bc")
    assert "sets of keys added up" in shown(monkeypatch, found, None, None, 0)
    assert "exp = weight" in shown(monkeypatch, looked_at("lineup"), None, None, 0)
