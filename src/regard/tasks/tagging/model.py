"""Taggers: scores of tags for every word, from a bag of features or an encoder's states, joined into a chain."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.attention.chain import best_paths, log_partition, marginals, path_score
from regard.attention.masks import padding
from regard.config.model import RNNConfig
from regard.config.structure import TaggerConfig
from regard.data.batching import Batch
from regard.data.vocabulary import PAD
from regard.nn.layers import Dropout, widen
from regard.nn.loss import Loss, Surprise, Trainable
from regard.nn.recurrent import RecurrentEncoder
from regard.nn.transformer import Encoder
from regard.tasks.encoder import LABELS


class Chain(NamedTuple):
    """The scores of taggings, as attention/chain.py takes them."""

    unary: Tensor  # (batch, n, tags)
    transitions: Tensor  # (tags, tags) or (batch, n - 1, tags, tags)
    lengths: Tensor  # (batch,)


def surprise(chain: Chain, answer: Tensor) -> Surprise:
    """The negative log-probability of taggings (batch, n), as ids of the vocabulary of tags."""
    gold = path_score(*chain[:2], (answer - LABELS).clamp(min=0), chain.lengths)
    return Surprise(log_partition(*chain) - gold, chain.lengths)


class ChainTagger(Trainable):
    """A chain of tags over words, whatever their scores come from. A CRF normalizes over whole taggings, an MEMM at
    every step given the tag before, a softmax at every step alone; an HMM is a chain like a CRF, with weights that are
    counted."""

    def __init__(self, config: TaggerConfig, tags: int) -> None:
        super().__init__()
        self.structure, self.word_dropout = config.structure, config.word_dropout
        self.dropout = Dropout(config.dropout)
        self.start, self.end = nn.Parameter(torch.zeros(tags)), nn.Parameter(torch.zeros(tags))
        self.transitions = nn.Parameter(torch.zeros(tags, tags))
        self.allowed: Tensor
        self.register_buffer("allowed", torch.ones(tags + 1, tags + 1, dtype=torch.bool), persistent=False)
        """Which tag (column) may follow which (row); the last of each is the edge of a sentence."""

    def word_scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What every tag of every word scores (batch, n, tags), and how many words there are (batch,)."""
        raise NotImplementedError

    def chain(self, batch: Batch) -> Chain:
        """The chain of every sentence."""
        scores, lengths = self.word_scores(batch)
        return self.join(widen(scores), lengths)

    def join(self, scores: Tensor, lengths: Tensor) -> Chain:
        """The scores of words (batch, n, tags) as a chain; what is forbidden scores minus infinity."""
        parts: tuple[Tensor, ...] = self.transitions, self.start, self.end
        moves, start, end = map(torch.zeros_like, parts) if self.structure == "softmax" else parts
        forbidden = ~self.allowed
        place = torch.arange(scores.shape[1], device=scores.device)
        if self.structure == "memm":
            dead = self.dead_ends(lengths, place)
            begin = normalize_step(scores[:, :1] + start, forbidden[-1, :-1] | dead[:, :1])
            steps = normalize_step(scores[:, 1:, None] + moves, forbidden[:-1, :-1] | dead[:, 1:, None])
            return Chain(torch.cat([begin, torch.zeros_like(scores[:, 1:])], dim=1), steps, lengths)
        last = (place == lengths[:, None] - 1)[..., None]
        start = start.masked_fill(forbidden[-1, :-1], -torch.inf)
        end = end.masked_fill(forbidden[:-1, -1], -torch.inf)
        scores = torch.where((place == 0)[:, None], scores + start, scores)
        return Chain(
            torch.where(last, scores + end, scores), moves.masked_fill(forbidden[:-1, :-1], -torch.inf), lengths
        )

    def dead_ends(self, lengths: Tensor, place: Tensor) -> Tensor:
        """Of every word at a place (n,) of sentences, the tags (batch, n, tags) behind which no allowed tagging of the
        rest is left. An MEMM gives them nothing: what it lost there, no later step could make up for."""
        found = [~self.allowed[:-1, -1]]
        for _ in place[1:]:
            found.append(~(self.allowed[:-1, :-1] & ~found[-1]).any(-1))
        return torch.stack(found)[(lengths[:, None] - 1 - place).clamp(min=0)]

    def logits(self, batch: Batch) -> Tensor:
        """How likely every tag of every word is (batch, n, tags), as logarithms."""
        return marginals(*self.chain(batch)).tags.clamp(min=1e-30).log()

    def surprise(self, batch: Batch) -> Surprise:
        """The negative log-probability of every row's tagging."""
        scores, lengths = self.word_scores(batch)
        return self.measure(widen(scores), lengths, batch.answer)

    def measure(self, scores: Tensor, lengths: Tensor, answer: Tensor) -> Surprise:
        """As `surprise`, from the scores of words (batch, n, tags). Of an MEMM, only the steps behind the tags that are
        given are normalized, not those behind all tags."""
        if self.structure != "memm":
            return surprise(self.join(scores, lengths), answer)
        tags, place = (answer - LABELS).clamp(min=0), torch.arange(scores.shape[1], device=scores.device)
        first, later = self.start.expand(len(scores), 1, -1), self.transitions[tags[:, :-1]]
        edge = self.allowed[-1, :-1].expand(len(scores), 1, -1)
        allowed = torch.cat([edge, self.allowed[:-1, :-1][tags[:, :-1]]], dim=1)
        steps = normalize_step(scores + torch.cat([first, later], dim=1), ~allowed | self.dead_ends(lengths, place))
        chosen = steps.gather(-1, tags[..., None])[..., 0].masked_fill(place >= lengths[:, None], 0.0)
        return Surprise(-chosen.sum(-1), lengths)

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        total, tokens = self.surprise(batch)
        return Loss(total.sum(), total.sum().detach(), int(tokens.sum()))

    def best(self, batch: Batch, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The best taggings (batch, count, n), their log-probabilities (batch, count), and the marginals of all tags
        (batch, n, tags)."""
        chain = self.chain(batch)
        paths, scores = best_paths(*chain, count)
        found = marginals(*chain)
        return paths, scores - found.log_partition[:, None], found.tags


class Tagger(ChainTagger):
    """A chain over features: every word is a bag of them, whose weights are its scores, or whose vectors an encoder
    reads."""

    def __init__(self, config: TaggerConfig, features: int, tags: int, width: int, longest: int) -> None:
        """`width` is how many ids the bag of a word has."""
        super().__init__(config, tags)
        self.width = width
        self.encoder = make_encoder(config, longest)
        inner = tags if self.encoder is None else config.size
        self.bag = nn.EmbeddingBag(features, inner, mode="sum", padding_idx=PAD)
        nn.init.normal_(self.bag.weight, std=0.0 if self.encoder is None else config.size**-0.5)
        self.output = None if self.encoder is None else nn.Linear(config.size, tags)

    def bags(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of the features of every word (batch, n, size), and how many words there are (batch,)."""
        ids = batch.source
        if self.training and self.word_dropout and self.encoder is not None:
            ids = ids.masked_fill(torch.rand(ids.shape, device=ids.device) < self.word_dropout, PAD)
        summed: Tensor = self.bag(ids.reshape(-1, self.width))
        return summed.view(len(ids), ids.shape[1] // self.width, summed.shape[-1]), batch.lengths // self.width

    def word_scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, lengths = self.bags(batch)
        if self.encoder is None or self.output is None:
            return x, lengths
        x = self.dropout(x)
        if isinstance(self.encoder, RecurrentEncoder):
            states, _ = self.encoder(x, lengths.clamp(min=1))
        else:
            states = self.encoder(x, padding(lengths, x.shape[1]))
        scores: Tensor = self.output(self.dropout(states))
        return scores, lengths


def normalize_step(scores: Tensor, forbidden: Tensor) -> Tensor:
    """Log-probabilities of scores (.., tags); a row in which all is forbidden has none, and no gradient either."""
    return scores.masked_fill(forbidden, -1e30).log_softmax(-1).masked_fill(forbidden, -torch.inf)


def make_encoder(config: TaggerConfig, longest: int) -> RecurrentEncoder | Encoder | None:
    """What reads the words."""
    if config.encoder == "rnn":
        size, dropout = config.size, config.dropout
        return RecurrentEncoder(
            RNNConfig(kind="rnn", cell="lstm", size=size, embedding=size, layers=config.layers, dropout=dropout)
        )
    return Encoder(config, config.layers, longest) if config.encoder == "transformer" else None
