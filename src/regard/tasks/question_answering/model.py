"""An encoder of question and context, and a question that attends to the context: by words or by spans."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.masks import padding
from regard.config.model import ReaderConfig
from regard.data.batching import Batch
from regard.data.vocabulary import EOS
from regard.nn.attention import CROSS, Attention, SeparateProjections, multi_head_attention
from regard.nn.layers import Dropout, OutputLayer, widen
from regard.nn.loss import Loss, Surprise, classify_loss
from regard.tasks.encoder import LABELS, TextEncoder, mean_states


def find_shared(source: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Which tokens of two parts of sources (batch, source) stand in the other part too: all are (batch, source)."""
    same = source[:, :, None] == source[:, None]
    across = (first[:, :, None] & second[:, None]) | (second[:, :, None] & first[:, None])
    return (same & across).any(2) & (source > EOS)


class Parts(NamedTuple):
    """Question and context, encoded together."""

    states: Tensor  # (batch, unit, size)
    question: Tensor  # (batch, 1, 1, unit) which units are the question's
    context: Tensor  # (batch, 1, 1, unit) which are the context's


class Reader(TextEncoder):
    """Question and context are encoded together, <bos> question <eos> context <eos>; then the question looks at the
    context. What it saw gives a word; or where it looked is the answer itself: a span, from start to end."""

    def __init__(self, config: ReaderConfig, vocab: int, labels: int | None, longest: int) -> None:
        super().__init__(config, vocab, longest + 1)  # the context has an end of its own
        self.answer = config.answer
        if config.share_layers:
            self.encoder.blocks = nn.ModuleList([self.encoder.blocks[0]] * config.layers)
        self.order = nn.Parameter(1 + torch.randn(longest, config.size)) if config.unit == "sentence" else None
        """(place, size) multiplies the word at each place of a sentence, so that a sum of words knows their order."""
        self.dropout = Dropout(config.dropout)
        if config.answer == "word":
            self.attention = multi_head_attention(config.size, config.heads, kind="cross", axes=CROSS)
            self.output = OutputLayer((labels or LABELS) - LABELS, config.size, None)
        else:
            size = config.size
            self.match = nn.Parameter(torch.randn(size) * size**-0.5)
            """(size,) is added to tokens that stand in question and context: names to look for (Chen 2017)."""
            self.ends = nn.Linear(size, 2 * size)
            pointer = SeparateProjections(nn.Linear(size, size), nn.Linear(size, size), nn.Identity())
            self.pointer = Attention(pointer, nn.Identity(), kind="cross", axes=CROSS)

    def parts(self, source: Tensor, lengths: Tensor) -> Parts:
        """source (batch, source) of lengths (batch,), encoded."""
        real = padding(lengths, source.shape[1])[:, 0, 0]
        ends = (source == EOS) & real
        segment = ends.cumsum(1) - ends.long()  # (batch, source) 0: the question; then sentence after sentence
        if self.order is None:
            asked, told = real & (segment == 0), real & (segment > 0)
            more = find_shared(source, asked, told)[..., None] * self.match if self.answer == "span" else 0.0
            states, _ = self.states(source, lengths, more)
            return Parts(states, asked[:, None, None], (told & ~ends)[:, None, None])
        count = ends.sum(1)  # (batch,) units: the question and the sentences
        unit = torch.where(segment == 0, 0, count[:, None] - segment)  # the latest sentence comes first
        begin = torch.where(ends, torch.arange(source.shape[1], device=source.device) + 1, 0).cummax(1).values
        place = torch.arange(source.shape[1], device=source.device) - F.pad(begin[:, :-1], (1, 0))
        words = self.source_embedding(self.hide_words(source)) * self.order[place]
        belongs = (unit[:, None] == torch.arange(int(count.max()), device=source.device)[:, None]) & real[:, None]
        facts = belongs.to(words.dtype) @ words  # (batch, unit, size)
        mask = padding(count, facts.shape[1])
        context = mask.clone()
        context[..., 0] = False
        question = torch.zeros_like(mask)
        question[..., 0] = True
        return Parts(self.encoder(facts, mask), question, context)

    def logits(self, batch: Batch) -> Tensor:
        """Logits: (batch, answers) of words; (batch, 2, source) of a span's first and last token."""
        states, question, context = self.parts(batch.source, batch.lengths)
        asked = mean_states(states, question)
        if self.answer == "word":
            kv = self.attention.project_kv(states)
            seen: Tensor = self.attention(self.attention.project_query(asked[:, None]), kv, context)[:, 0]
            logits: Tensor = self.output(self.dropout(asked + seen))
            return logits
        queries = self.pointer.project_query(torch.tanh(self.ends(asked)).view(len(asked), 2, -1))
        kv = self.pointer.project_kv(states)
        self.pointer(queries, kv, context)  # its context vector is not used; called so that it can be looked at
        scores: Tensor = self.pointer.score(queries, kv.keys)[:, 0]
        return scores.masked_fill(~context[:, 0], torch.finfo(scores.dtype).min)

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        logits = widen(self.logits(batch))
        if self.answer == "word":
            return classify_loss(logits, batch.answer[:, 0] - LABELS, label_smoothing)
        return classify_loss(
            logits.flatten(0, 1), batch.answer.flatten(), 0.0
        )  # it makes no sense to smooth over padding

    def surprise(self, batch: Batch) -> Surprise:
        """The negative log-probability of every row's word, or of the two ends of its span."""
        logits = widen(self.logits(batch))
        if self.answer == "word":
            nats = F.cross_entropy(logits, batch.answer[:, 0] - LABELS, reduction="none")
            return Surprise(nats, torch.ones_like(batch.lengths))
        nats = F.cross_entropy(logits.transpose(1, 2), batch.answer, reduction="none").sum(1)
        return Surprise(nats, torch.full_like(batch.lengths, 2))

    def probabilities(self, batch: Batch) -> Tensor:
        """Of every word (batch, answers)."""
        return widen(self.logits(batch)).softmax(-1)
