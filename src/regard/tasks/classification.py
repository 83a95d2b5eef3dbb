"""Text classification: class queries that attend to the text, or one pooled vector; alone or as an ensemble."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config.model import ClassifierConfig, ModelConfig
from regard.config.run import Config
from regard.data.batching import Batch
from regard.data.encoding import reject_surrogates
from regard.data.examples import Dropped, Example
from regard.data.vocabulary import PAD, Vocabularies
from regard.errors import ConfigError
from regard.nn.attention import CROSS, multi_head_attention
from regard.nn.layers import Dropout, OutputLayer, widen
from regard.nn.loss import Loss, Surprise, classify_loss
from regard.tasks.axes import Piece
from regard.tasks.encoder import LABELS, EncoderTask, LabelTask, TextEncoder, learn_label_vocabularies, mean_states
from regard.tasks.page import FORMS
from regard.tasks.task import Answer, Architecture, Metric, Say


class Classifier(TextEncoder):
    """Every class attends to the text with a learned query of its own, and what it saw decides how likely it is; or all
    classes judge one vector of the text: the mean of its states, or the first."""

    def __init__(self, config: ClassifierConfig, vocab: int, labels: int, longest: int) -> None:
        """`labels` is the size of the labels' vocabulary, with its special entries."""
        super().__init__(config, vocab, longest)
        count = labels - LABELS
        self.pooling, self.multi_label = config.pooling, config.multi_label
        attends = config.pooling == "classes"
        self.classes = nn.Parameter(torch.randn(count, config.size)) if attends else None  # small, all would look alike
        self.attention = multi_head_attention(config.size, config.heads, kind="cross", axes=CROSS) if attends else None
        self.dropout = Dropout(config.dropout)
        self.output = OutputLayer(count, config.size, None)
        self.temperature = nn.Parameter(torch.ones(1), requires_grad=False)
        """Divides the logits, so that probabilities are calibrated; fitted on validation data, after training."""
        alone = config.model_copy(update={"ensemble_size": 1})
        self.ensemble = nn.ModuleList(
            Classifier(alone, vocab, labels, longest) for _ in range(config.ensemble_size - 1)
        )
        for member in self.ensemble if config.freeze_vectors else ():
            member.source_embedding = self.source_embedding

    def logits(self, batch: Batch) -> Tensor:
        """Calibrated logits (batch, classes), of the whole ensemble."""
        calibrated: Tensor = average_votes(self.member_logits(batch), self.multi_label) / self.temperature
        return calibrated

    def member_logits(self, batch: Batch) -> list[Tensor]:
        """Every member's logits (batch, classes)."""
        members: list[Classifier] = [self, *self.ensemble]
        return [widen(member.own_logits(batch)) for member in members]

    def own_logits(self, batch: Batch) -> Tensor:
        """This member's logits (batch, classes)."""
        states, mask = self.states(batch.source, batch.lengths)
        if self.attention is not None and self.classes is not None:
            queries = self.attention.project_query(self.classes.expand(len(states), -1, -1))
            seen = self.dropout(self.attention(queries, self.attention.project_kv(states), mask))
            logits: Tensor = (seen * self.output.weight).sum(-1) + self.output.bias
        else:
            pooled = mean_states(states, mask) if self.pooling == "mean" else states[:, 0]
            logits = self.output(self.dropout(pooled))
        return logits

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        found = [self.member_loss(logits, batch, label_smoothing) for logits in self.member_logits(batch)]
        total, plain, count = zip(*found, strict=True)
        return Loss(torch.stack(total).mean(), torch.stack(plain).mean(), count[0])

    def member_loss(self, logits: Tensor, batch: Batch, label_smoothing: float) -> Loss:
        """The loss of one member's logits (batch, classes)."""
        if self.multi_label:
            total = label_surprise(logits, batch.answer).sum()
            return Loss(total, total.detach(), batch.tokens)
        return classify_loss(logits, batch.answer[:, 0] - LABELS, label_smoothing)

    def surprise(self, batch: Batch) -> Surprise:
        """Of every row, the mean of what the members' losses are."""
        tokens = (batch.answer != PAD).sum(1).clamp(min=1)
        if self.multi_label:
            nats = [label_surprise(logits, batch.answer).sum(1) for logits in self.member_logits(batch)]
        else:
            wanted = batch.answer[:, 0] - LABELS
            nats = [F.cross_entropy(logits, wanted, reduction="none") for logits in self.member_logits(batch)]
        return Surprise(torch.stack(nats).mean(0), tokens)

    def probabilities(self, batch: Batch) -> Tensor:
        """Of every class (batch, classes): they sum to 1, unless a text may have several."""
        logits = widen(self.logits(batch))
        return logits.sigmoid() if self.multi_label else logits.softmax(-1)


def average_votes(votes: list[Tensor], multi_label: bool) -> Tensor:
    """The logits (batch, classes) whose probabilities are the mean of those of several logits."""
    if len(votes) == 1:
        return votes[0]
    if multi_label:
        return torch.stack(votes).sigmoid().mean(0).logit(eps=1e-6)
    return torch.stack(votes).log_softmax(-1).logsumexp(0)


def label_surprise(logits: Tensor, answer: Tensor) -> Tensor:
    """The surprise (batch, classes) that each of the classes is a label or none: logits (batch, classes), answer
    (batch, n)."""
    hot = logits.new_zeros(len(logits), logits.shape[1] + LABELS).scatter_(1, answer, 1.0)[:, LABELS:]
    return F.binary_cross_entropy_with_logits(logits, hot, reduction="none")


class ClassificationTask(LabelTask, EncoderTask):
    """The label of a text, or its labels."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (ClassifierConfig,)
    settings: ClassifierConfig
    verb = "classify"
    metrics: ClassVar[tuple[str | Metric, ...]] = ("accuracy", "exact", "error", "f1", "ece", "perplexity")
    form = FORMS["classification"]

    @classmethod
    def accept(cls, example: Example, config: Config) -> Example | Dropped:
        """A text that may have several labels may have none."""
        assert isinstance(config.model, ClassifierConfig)
        if config.model.multi_label and example.source.strip():
            return reject_surrogates(example)
        return super().accept(example, config)

    @classmethod
    def adopt(cls, config: Config, pretrained: Config) -> Config:
        adopted = super().adopt(config, pretrained)
        return adopted.model_copy(update={"model": adopted.model.model_copy(update={"ensemble_size": 1})})

    @classmethod
    def learn_vocabularies(cls, config: Config, examples: Sequence[Example], raw: Sequence[str]) -> Vocabularies:
        sources = [*(str(example.source) for example in examples), *raw]
        return learn_label_vocabularies(config, sources, [example.target for example in examples])

    def build(self) -> Classifier:
        longest = self.config.text.max_length + 2
        return Classifier(self.settings, self.source.size, self.target.size, longest)

    def initialize(self, model: Any, raw: Callable[[], Iterable[str]], say: Say) -> None:
        super().initialize(model, raw, say)
        if self.settings.source_vectors or self.config.text.raw:
            for member in model.ensemble:
                member.source_embedding.load_state_dict(model.source_embedding.state_dict())

    def calibrate(self, model: Any, batches: Callable[[], Iterable[Batch]]) -> dict[str, Tensor]:
        """Temperature scaling (Guo 2017): accuracy stays as it is, probabilities become honest. Of two hundred numbers
        between 1/2 and 8, the one with the least surprise on validation data; none is smaller, for few examples that
        are all right would make it sure of everything."""
        model.temperature.fill_(1.0)
        with torch.inference_mode():
            found = [(model.logits(batch).float(), batch.answer) for batch in batches()]

        def surprise(choice: float) -> float:
            if self.settings.multi_label:
                return sum(float(label_surprise(logits / choice, answer).sum()) for logits, answer in found)
            return sum(
                float(classify_loss(logits / choice, answer[:, 0] - LABELS, 0).plain) for logits, answer in found
            )

        choices: list[float] = torch.logspace(-1, 3, 201, base=2.0).tolist()
        return {"temperature": torch.tensor([min(choices, key=surprise)])}

    def choose(self, probabilities: Tensor, best: int) -> list[Answer]:
        """Of a text that may have several labels, all that are likelier than not are one answer."""
        if not self.settings.multi_label:
            return super().choose(probabilities, best)
        tokens = [token for token, _ in self.rank(probabilities)]
        likely = [token.text for token in tokens if token.logprob is not None and token.logprob > math.log(0.5)]
        whole = float(torch.maximum(probabilities, 1 - probabilities).log().sum())  # these, and none of the others
        return [Answer((self.separator or "").join(likely), whole, tokens)]

    def query_pieces(self) -> list[Piece]:
        return [Piece(self.target.token(i), 0, 0) for i in range(LABELS, self.target.size)]

    def look_logprobs(self, model: Any, batch: Batch, answer: Answer) -> list[float]:
        """Of every class."""
        with torch.inference_mode():
            chances = model.probabilities(batch)[0].cpu()
        return [float(chance) for chance in chances.clamp(min=1e-30).log()]

    def architecture(self) -> Architecture:
        raise ConfigError("it is a classifier, with an attention behind its encoder")
