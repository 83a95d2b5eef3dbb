"""Taggers over a pretrained encoder: words as sub-words, of which the first one's state is the word's."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.attention.masks import padding
from regard.config.structure import TaggerConfig
from regard.data.batching import Batch
from regard.data.vocabulary import BOS, EOS, PAD, UNK, Tokens, Vocabulary
from regard.nn.layers import make_embedding
from regard.nn.transformer import Encoder
from regard.tasks.tagging.model import ChainTagger

IDS = 2
"""Ids of one sub-word: its own, and whether a word begins with it (BOS) or not (PAD)."""


def split_words(words: Sequence[str], vocabulary: Vocabulary) -> list[Tokens]:
    """The sub-words of every word, each word by itself; one of which the vocabulary leaves nothing is unknown."""
    found = zip(words, vocabulary.encode_all(words), strict=True)
    return [tokens if tokens.ids else Tokens([UNK], [(0, len(word))]) for word, tokens in found]


def encode_words(words: Sequence[Tokens], most: int) -> tuple[list[int], int]:
    """The ids of at most so many sub-words, <bos> before and <eos> behind them, and how many there were before they
    were cut. A word that is cut in two keeps its first ones."""
    marked = [(i, PAD if place else BOS) for tokens in words for place, i in enumerate(tokens.ids)]
    framed = [(BOS, PAD), *marked[:most], (EOS, PAD)] if marked else []
    return list(itertools.chain.from_iterable(framed)), len(marked)


def count_words(ids: Sequence[int]) -> int:
    """The words of an encoded source."""
    return ids[1::IDS].count(BOS)


class SubwordTagger(ChainTagger):
    """A chain over the states of words in an encoder of sub-words; names are those of a pretrained encoder's run."""

    def __init__(self, config: TaggerConfig, vocab: int, tags: int, longest: int) -> None:
        super().__init__(config, tags)
        self.source_embedding = make_embedding(vocab, config.size)
        self.encoder = Encoder(config, config.layers, longest)
        self.output = nn.Linear(config.size, tags)

    def word_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The state of every word's first sub-word (batch, n, size), and how many words there are (batch,)."""
        ids, marks = batch.source[:, ::IDS], batch.source[:, 1::IDS]
        if self.training and self.word_dropout:
            hidden = torch.rand(ids.shape, device=ids.device) < self.word_dropout
            ids = ids.masked_fill(hidden & (ids > EOS), UNK)
        states: Tensor = self.encoder(self.source_embedding(ids), padding(batch.lengths // IDS, ids.shape[1]))
        begins = marks == BOS
        lengths = begins.sum(1)
        places = (~begins).int().argsort(dim=1, stable=True)[:, : int(lengths.max())]  # those that begin a word first
        return states.gather(1, places[..., None].expand(-1, -1, states.shape[-1])), lengths

    def word_scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        states, lengths = self.word_states(batch)
        scores: Tensor = self.output(self.dropout(states))
        return scores, lengths
