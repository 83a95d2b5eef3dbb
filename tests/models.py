"""Models and tasks of settings, without a run around them."""

import torch

from regard.config.run import Config
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.tasks import make_task


def build(config: Config, source: Vocabulary, target: Vocabulary | None = None):
    """The model of a configuration, its weights drawn from the configuration's seed."""
    torch.manual_seed(config.train.seed)
    return make_task(config, Vocabularies(source, target or source)).build()
