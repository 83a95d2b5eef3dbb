"""Classes of images: the mean of an encoder's grid chooses. With self-attention between the stages of a CNN, or not."""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config.model import ModelConfig
from regard.config.run import Config
from regard.config.vision import ImageClassifierConfig
from regard.data.batching import Batch
from regard.data.encoding import Encoded
from regard.data.examples import Example
from regard.data.vocabulary import Vocabularies
from regard.nn.layers import Dropout, widen
from regard.nn.loss import Loss, Surprise, Trainable, classify_loss
from regard.nn.vision.encoders import read_gates
from regard.tasks.axes import Tokens
from regard.tasks.encoder import LABELS, LabelTask, learn_label_vocabularies
from regard.tasks.page import FORMS
from regard.tasks.task import Answer, Metric
from regard.tasks.vision.images import ImageTask, make_encoder
from regard.tasks.vision.model import encode_images


class ImageClassifier(Trainable):
    """An image encoder, and classes that see the mean of its grid."""

    def __init__(self, config: ImageClassifierConfig, classes: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = make_encoder(config)
        self.dropout = Dropout(config.dropout)
        self.classes = nn.Linear(self.encoder.size, classes)

    def encoder_states(self, source: Tensor, lengths: Tensor) -> Tensor:
        """Pixels or features -> the grid (batch, cells, size)."""
        return encode_images(self.encoder, source, self.config, self.training)

    def gauges(self) -> dict[str, float]:
        return read_gates(self.encoder)

    def logits(self, batch: Batch) -> Tensor:
        """(batch, classes)."""
        grid = self.encoder_states(batch.source, batch.lengths)
        return widen(self.classes(self.dropout(grid.mean(1))))

    def probabilities(self, batch: Batch) -> Tensor:
        """(batch, classes)."""
        return self.logits(batch).softmax(-1)

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        return classify_loss(self.logits(batch), batch.answer[:, 0] - LABELS, label_smoothing)

    def surprise(self, batch: Batch) -> Surprise:
        """The negative log-probability of every row's class."""
        nats = F.cross_entropy(self.logits(batch), batch.answer[:, 0] - LABELS, reduction="none")
        return Surprise(nats, torch.ones_like(batch.lengths))


class ImageClassificationTask(ImageTask, LabelTask):
    """The label of an image."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (ImageClassifierConfig,)
    settings: ImageClassifierConfig
    verb = "classify images"
    metrics: ClassVar[tuple[str | Metric, ...]] = ("accuracy", "exact", "error", "f1", "ece", "perplexity")
    form = FORMS["image_classification"]

    @classmethod
    def learn_vocabularies(cls, config: Config, examples: Sequence[Example], raw: Sequence[str]) -> Vocabularies:
        """Only labels have words: one vocabulary serves both sides."""
        labels = [example.target for example in examples]
        target = learn_label_vocabularies(config, labels, labels).target
        return Vocabularies(target, target)

    def build(self) -> ImageClassifier:
        return ImageClassifier(self.settings, self.target.size - LABELS)

    def axes(self, source: Encoded, answer: Answer) -> Tokens:
        return {**self.cells(), "query": [], "input": []}
