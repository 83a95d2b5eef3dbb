"""Models and tasks of settings, without a run around them."""

import torch

from regard.config.run import Config
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.tasks import make_task


def build(config: Config, source: Vocabulary, target: Vocabulary | None = None, seed: int = 1):
    """The model of a configuration, with weights of its own: the seed of training does not matter here."""
    torch.manual_seed(seed)
    return make_task(config, Vocabularies(source, target or source)).build()
