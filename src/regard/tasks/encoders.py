"""Models that are an encoder and something that looks at its states: classes (E3), or a question (E4)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention.masks import padding
from regard.config.config import ClassifierConfig, EncoderConfig, ReaderConfig
from regard.data.batching import Batch
from regard.data.vocabulary import EOS, SPECIAL, UNK
from regard.nn.attention import Attention, Separate, multi_head
from regard.nn.layers import Dropout, Linear, Output, embedding, wide
from regard.nn.loss import Loss, Trainable
from regard.nn.transformer import Encoder

LABELS = len(SPECIAL)
"""The first class's id in the vocabulary of labels."""


class TextEncoder(Trainable):
    """D2: tokens -> states."""

    def __init__(self, config: EncoderConfig, vocab: int, longest: int) -> None:
        super().__init__()
        self.source_embedding = embedding(vocab, config.size)
        self.encoder = Encoder(config, config.layers, longest)
        self.hidden_share = config.token_dropout
        width = 2 * config.window + 1
        self.window = nn.Conv1d(config.size, config.size, width, padding=config.window) if config.window else None
        self.window_dropout = Dropout(config.dropout)

    def states(self, source: Tensor, lengths: Tensor, more: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """source (batch, source) -> states (batch, source, size), and which of them are real (batch, 1, 1, source).
        `more` (batch, source, size) is added to the embeddings."""
        source = self.hide(source)
        mask = padding(lengths, source.shape[1])
        full = bool((lengths == source.shape[1]).all())
        return self.encoder(self.mixed(self.source_embedding(source) + more, mask), None if full else mask), mask

    def mixed(self, x: Tensor, mask: Tensor) -> Tensor:
        """Embeddings (batch, source, size), each with what the window around it says; padding says nothing."""
        if self.window is None:
            return x
        scaled = self.window_dropout(x * mask[:, 0, 0, :, None] * self.encoder.scale)
        return x + F.relu(self.window(scaled.mT).mT) / self.encoder.scale

    def hide(self, source: Tensor) -> Tensor:
        """While training, ids (batch, source) with a share of the words behind <unk>: no rare word can be relied on."""
        if not self.training or not self.hidden_share:
            return source
        hidden = torch.rand(source.shape, device=source.device) < self.hidden_share
        return source.masked_fill(hidden & (source > EOS), UNK)

    def forward(self, batch: Batch) -> Tensor:
        """The states (batch, source, size)."""
        return self.states(batch.source, batch.lengths)[0]


def mean(states: Tensor, mask: Tensor) -> Tensor:
    """The mean (batch, size) of states (batch, source, size) that are real: mask (batch, 1, 1, source)."""
    real = mask[:, 0, 0, :, None].to(states.dtype)
    return (states * real).sum(1) / real.sum(1).clamp(min=1)


class Classifier(TextEncoder):
    """E3: every class looks at the text with a learned query of its own, and what it saw decides how likely it is; or
    all classes judge one vector of the text: the mean of its states, or the first."""

    def __init__(self, config: ClassifierConfig, vocab: int, labels: int, longest: int) -> None:
        """`labels` is the size of the labels' vocabulary, with its special entries."""
        super().__init__(config, vocab, longest)
        count = labels - LABELS
        self.pool, self.multiple = config.pool, config.multiple
        looks = config.pool == "classes"
        self.classes = nn.Parameter(torch.randn(count, config.size)) if looks else None  # small, all would look alike
        self.attention = multi_head(config.size, config.heads) if looks else None
        self.dropout = Dropout(config.dropout)
        self.output = Output(count, config.size, None)
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=False)
        """Divides the logits, so that probabilities are calibrated; fitted on validation data, after training."""
        alone = config.model_copy(update={"members": 1})
        self.others = nn.ModuleList(Classifier(alone, vocab, labels, longest) for _ in range(config.members - 1))
        for other in self.others if config.freeze_vectors else ():
            other.source_embedding = self.source_embedding

    def forward(self, batch: Batch) -> Tensor:
        """Logits (batch, classes), of all members together."""
        calibrated: Tensor = agreed(self.votes(batch), self.multiple) / self.temperature
        return calibrated

    def votes(self, batch: Batch) -> list[Tensor]:
        """Every member's logits (batch, classes)."""
        members: list[Classifier] = [self, *self.others]
        return [wide(member.vote(batch)) for member in members]

    def vote(self, batch: Batch) -> Tensor:
        """This member's logits (batch, classes)."""
        states, mask = self.states(batch.source, batch.lengths)
        if self.attention is not None and self.classes is not None:
            queries = self.attention.ask(self.classes.expand(len(states), -1, -1))
            seen = self.dropout(self.attention(queries, self.attention.remember(states), mask))
            logits: Tensor = (seen * self.output.weight).sum(-1) + self.output.bias
        else:
            logits = self.output(self.dropout(mean(states, mask) if self.pool == "mean" else states[:, 0]))
        return logits

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Loss:
        found = [self.judged(logits, batch, smoothing) for logits in self.votes(batch)]
        total, plain, count = zip(*found, strict=True)
        return Loss(torch.stack(total).mean(), torch.stack(plain).mean(), count[0])

    def judged(self, logits: Tensor, batch: Batch, smoothing: float) -> Loss:
        """The loss of one member's logits (batch, classes)."""
        if self.multiple:
            total = several(logits, batch.answer)
            return Loss(total, total.detach(), batch.tokens)
        return judged(logits, batch.answer[:, 0] - LABELS, smoothing)

    def probabilities(self, batch: Batch) -> Tensor:
        """Of every class (batch, classes): they sum to 1, unless a text may have several."""
        logits = wide(self(batch))
        return logits.sigmoid() if self.multiple else logits.softmax(-1)


def agreed(votes: list[Tensor], multiple: bool) -> Tensor:
    """The logits (batch, classes) whose probabilities are the mean of those of several logits."""
    if len(votes) == 1:
        return votes[0]
    if multiple:
        return torch.stack(votes).sigmoid().mean(0).logit(eps=1e-6)
    return torch.stack(votes).log_softmax(-1).logsumexp(0)


def several(logits: Tensor, answer: Tensor) -> Tensor:
    """The surprise that each of the classes is a label or none, in all: logits (batch, classes), answer (batch, n)."""
    hot = logits.new_zeros(len(logits), logits.shape[1] + LABELS).scatter_(1, answer, 1.0)[:, LABELS:]
    return F.binary_cross_entropy_with_logits(logits, hot, reduction="sum")


def judged(logits: Tensor, wanted: Tensor, smoothing: float) -> Loss:
    """The loss of choosing one: logits (batch, choices), wanted (batch,)."""
    total = F.cross_entropy(logits, wanted, reduction="sum", label_smoothing=smoothing)
    plain = F.cross_entropy(logits.detach(), wanted, reduction="sum")
    return Loss(total, plain, len(wanted))


def shared(source: Tensor, first: Tensor, second: Tensor) -> Tensor:
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
    """E4: question and context are encoded together, <bos> question <eos> context <eos>; then the question looks at the
    context. What it saw gives a word; or where it looked is the answer itself: a span, from start to end."""

    def __init__(self, config: ReaderConfig, vocab: int, labels: int | None, longest: int) -> None:
        super().__init__(config, vocab, longest + 1)  # the context has an end of its own
        self.answer, self.longest = config.answer, config.longest
        if config.shared:
            self.encoder.blocks = nn.ModuleList([self.encoder.blocks[0]] * config.layers)
        self.order = nn.Parameter(1 + torch.randn(longest, config.size)) if config.unit == "sentence" else None
        """(place, size) multiplies the word at each place of a sentence, so that a sum of words knows their order."""
        self.dropout = Dropout(config.dropout)
        if config.answer == "word":
            self.attention = multi_head(config.size, config.heads)
            self.output = Output((labels or LABELS) - LABELS, config.size, None)
        else:
            size = config.size
            self.match = nn.Parameter(torch.randn(size) * size**-0.5)
            """(size,) is added to tokens that stand in question and context: names to look for (Chen 2017)."""
            self.ends = Linear(size, 2 * size)
            self.pointer = Attention(Separate(Linear(size, size), Linear(size, size), nn.Identity()), nn.Identity())

    def parts(self, source: Tensor, lengths: Tensor) -> Parts:
        """source (batch, source) of lengths (batch,), encoded."""
        real = padding(lengths, source.shape[1])[:, 0, 0]
        ends = (source == EOS) & real
        segment = ends.cumsum(1) - ends.long()  # (batch, source) 0: the question; then sentence after sentence
        if self.order is None:
            asked, told = real & (segment == 0), real & (segment > 0)
            more = shared(source, asked, told)[..., None] * self.match if self.answer == "span" else 0.0
            states, _ = self.states(source, lengths, more)
            return Parts(states, asked[:, None, None], (told & ~ends)[:, None, None])
        count = ends.sum(1)  # (batch,) units: the question and the sentences
        unit = torch.where(segment == 0, 0, count[:, None] - segment)  # the latest sentence comes first
        begin = torch.where(ends, torch.arange(source.shape[1], device=source.device) + 1, 0).cummax(1).values
        place = torch.arange(source.shape[1], device=source.device) - F.pad(begin[:, :-1], (1, 0))
        words = self.source_embedding(self.hide(source)) * self.order[place]
        belongs = (unit[:, None] == torch.arange(int(count.max()), device=source.device)[:, None]) & real[:, None]
        facts = belongs.to(words.dtype) @ words  # (batch, unit, size)
        mask = padding(count, facts.shape[1])
        context = mask.clone()
        context[..., 0] = False
        question = torch.zeros_like(mask)
        question[..., 0] = True
        return Parts(self.encoder(facts, mask), question, context)

    def forward(self, batch: Batch) -> Tensor:
        """Logits: (batch, answers) of words; (batch, 2, source) of a span's first and last token."""
        states, question, context = self.parts(batch.source, batch.lengths)
        asked = mean(states, question)
        if self.answer == "word":
            memory = self.attention.remember(states)
            seen: Tensor = self.attention(self.attention.ask(asked[:, None]), memory, context)[:, 0]
            logits: Tensor = self.output(self.dropout(asked + seen))
            return logits
        queries = self.pointer.ask(torch.tanh(self.ends(asked)).view(len(asked), 2, -1))
        memory = self.pointer.remember(states)
        self.pointer(queries, memory, context)  # its context vector is not used; called so that it can be looked at
        scores: Tensor = self.pointer.score(queries, memory.keys)[:, 0]
        return scores.masked_fill(~context[:, 0], torch.finfo(scores.dtype).min)

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Loss:
        logits = wide(self(batch))
        if self.answer == "word":
            return judged(logits, batch.answer[:, 0] - LABELS, smoothing)
        return judged(logits.flatten(0, 1), batch.answer.flatten(), 0.0)  # there is no sense in smoothing over padding

    def probabilities(self, batch: Batch) -> Tensor:
        """Of every word (batch, answers)."""
        logits = wide(self(batch))
        return logits.softmax(-1)
