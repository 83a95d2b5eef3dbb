"""Embedding: an encoder alone, which gives texts and tokens their vectors and has nothing to answer."""

from typing import ClassVar

from regard.config.model import EncoderConfig, ModelConfig
from regard.config.run import Config
from regard.errors import ConfigError
from regard.tasks.encoder import EncoderTask, TextEncoder
from regard.tasks.page import FORMS
from regard.tasks.task import Architecture, Metric


class EmbeddingTask(EncoderTask):
    """Vectors of texts."""

    kinds: ClassVar[tuple[type[ModelConfig], ...]] = (EncoderConfig,)
    settings: EncoderConfig
    verb = "embed"
    metrics: ClassVar[tuple[str | Metric, ...]] = ()
    gives_answers = False
    form = FORMS["embedding"]

    @classmethod
    def check(cls, config: Config) -> None:
        raise ConfigError(
            "an encoder alone has nothing to learn: train a classifier or a reader, or import an encoder."
        )

    def build(self) -> TextEncoder:
        return TextEncoder(self.settings, self.source.size, self.config.text.max_length + 2)

    def architecture(self) -> Architecture:
        return Architecture(encoder=True, decoder=False)
