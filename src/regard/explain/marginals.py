"""How a marginal comes about: the structures of a short text one by one, and the sums of their probabilities.

A dynamic program adds up all taggings, trees or sets of keys without ever listing them. Here they are listed, so that
everybody can add them up. The weights of a matching are no such sums: they are balanced, and what balances them is
shown, a potential of the row and one of each column (`attention/matching.py`).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention.chain import best_paths, log_partition, path_score
from regard.attention.matching import TINY, sinkhorn
from regard.attention.normalizers import matching, nonprojective_trees, projective_trees
from regard.errors import InputError
from regard.explain.look import Look
from regard.explain.uses import Use
from regard.nn.attention import Segments

TAGGINGS, TREE_WORDS, SEGMENT_KEYS, SHOWN = 20_000, 6, 12, 8
"""How many taggings are listed at most, the words of a tree and the keys of a segment chain; how many are shown."""


class TooLongError(InputError):
    """A text has more structures than can be listed."""


class Marginal(NamedTuple):
    """The likeliest structures behind one row of a map, best first, and what all that were listed sum to."""

    kind: str  # what they are: taggings, trees or sets of keys
    structures: Tensor  # (shown, place): every word's tag; every word's parent; whether each key is chosen
    chances: Tensor  # (shown,): their probabilities
    picks: Tensor  # (shown, column): which columns of the row each has
    sums: Tensor  # (column,): the probabilities of those that have it, added up
    total: int  # how many structures there are
    complete: bool  # whether all of them were added up
    covered: float  # how likely those are that were


class Potentials(NamedTuple):
    """A row of a matching: each weight is exp(score + row + column)."""

    scores: Tensor  # (key,)
    row: Tensor  # ()
    columns: Tensor  # (key,): their mean is 0; minus infinity for a key that may not be seen


def list_choices(choices: int, places: int) -> Tensor:
    """Every way (choices ** places, places) to make one of some choices at each of some places."""
    powers = choices ** torch.arange(places - 1, -1, -1)
    return torch.arange(choices**places)[:, None] // powers % choices


def list_trees(words: int, *, projective: bool) -> Tensor:
    """Every tree (trees, word) as the parents of its words; the root is its own. Projective: whatever stands between a
    word and its parent is below that parent."""
    parents, places = list_choices(words, words), torch.arange(words)
    parents = parents[(parents == places).sum(1) == 1]
    above, reached = F.one_hot(places, words).bool().expand(len(parents), -1, -1), parents
    for _ in range(words):
        above, reached = above | F.one_hot(reached, words).bool(), parents.gather(1, reached)
    is_tree = (parents.gather(1, reached) == reached).all(1)  # no word is in a cycle
    if projective:
        low, high = (extreme(parents, places)[..., None] for extreme in (torch.minimum, torch.maximum))
        below = above.gather(2, parents[:, None].expand(-1, words, -1)).mT  # (tree, word, other): below its parent
        is_tree &= ~((low < places) & (places < high) & ~below).any(2).any(1)
    return parents[is_tree]


def add_up(kind: str, structures: Tensor, chances: Tensor, picks: Tensor, total: int) -> Marginal:
    """The likeliest of the structures that were listed, and the sums over all of them."""
    order = chances.argsort(descending=True, stable=True)[: min(SHOWN, int((chances > 0).sum()))]
    sums = (chances[:, None] * picks).sum(0)
    shown = structures[order], chances[order], picks[order]
    return Marginal(kind, *shown, sums, total, len(structures) == total, float(chances.sum()))


def add_taggings(unary: Tensor, transitions: Tensor, lengths: Tensor, row: int) -> Marginal:
    """One word's tags, in all taggings of its sentence; in the likeliest, where there are too many. The chain is a
    batch of one."""
    unary, transitions, lengths = unary.double().cpu(), transitions.double().cpu(), lengths.cpu()
    _, words, tags = unary.shape
    if (total := tags**words) <= TAGGINGS:
        paths = list_choices(tags, words)
        moves = transitions if transitions.dim() == 2 else transitions.expand(total, -1, -1, -1)
        chances = path_score(unary.expand(total, -1, -1), moves, paths, lengths.expand(total)).softmax(0)
    else:
        paths, scores = (one[0] for one in best_paths(unary, transitions, lengths, SHOWN))
        chances = (scores - log_partition(unary, transitions, lengths)).exp()
    return add_up("taggings", paths, chances, F.one_hot(paths[:, row], tags).bool(), total)


def add_trees(scores: Tensor, row: int, *, projective: bool) -> Marginal:
    """One word's parents, in all trees of its text: scores (word, parent)."""
    words = len(scores)
    if words > TREE_WORDS:
        raise TooLongError(f"the text is too long to enumerate its trees (at most {TREE_WORDS} words, it has {words}).")
    trees = list_trees(words, projective=projective)
    chances = scores[torch.arange(words), trees].sum(1).softmax(0)
    return add_up("trees", trees, chances, F.one_hot(trees[:, row], words).bool(), len(trees))


def add_segments(scores: Tensor, seen: Tensor, transitions: Tensor) -> Marginal:
    """All sets of the keys that may be seen: scores (key,) of being chosen, transitions (2, 2)."""
    keys = seen.nonzero()[:, 0]
    if len(keys) > SEGMENT_KEYS:
        limit = f"at most {SEGMENT_KEYS} words, it has {len(keys)}"
        raise TooLongError(f"the text is too long to enumerate its sets of keys ({limit}).")
    chosen = list_choices(2, len(keys))
    totals = (chosen * scores[keys].double()).sum(1) + transitions.double()[chosen[:, :-1], chosen[:, 1:]].sum(1)
    every = torch.zeros(len(chosen), len(scores), dtype=torch.long).index_copy_(1, keys, chosen)
    return add_up("sets of keys", every, totals.softmax(0), every.bool(), len(chosen))


def balance_row(scores: Tensor, seen: Tensor, row: int) -> Potentials:
    """What balances one row of a matching: scores and who may be matched with whom, (query, key)."""
    queries, keys = seen.any(1), seen.any(0)
    added = sinkhorn(scores, seen).weights.clamp(min=TINY).log() - scores
    inner = added[queries][:, keys]
    columns = torch.full_like(scores[row], -torch.inf)
    columns[keys] = inner.mean(0) - inner.mean()
    return Potentials(scores[row], added[row, keys].mean(), columns)


def score_all(use: Use, head: int) -> Tensor:
    """All scores (query, key) of one head of an attention that weighs the queries of a text together."""
    (queries,), part, kv = use.queries, slice(head, head + 1), use.kv.repeat_heads(use.attention.heads)
    score = use.attention.score_with_positions(queries, kv, part)
    return score(queries[:, part], kv.keys[:, part])[0, 0].double().cpu()


@torch.inference_mode()
def trace_row(found: Look, row: int, head: int = 0, name: str | None = None) -> Marginal | Potentials | None:
    """How the weights of one row of one head come about, if they are a structure's."""
    name = found.find_map(name)
    if own := found.structures.get(name):
        if not 0 <= row < own.weights.shape[1]:
            raise InputError(f"row {row} was asked for; {name} has {own.weights.shape[1]} rows (from 0).")
        return add_taggings(*own.chain, row)
    calculation, use = found.calculate(row, head, name), found.uses[name]
    normalize = use.attention.normalize
    if isinstance(normalize, Segments):
        return add_segments(calculation.scaled, calculation.seen, normalize.transitions.cpu())
    if normalize in (projective_trees, nonprojective_trees):
        return add_trees(score_all(use, head), row, projective=normalize is projective_trees)
    if normalize is matching:
        return balance_row(score_all(use, head), use.seen(), row)
    return None
