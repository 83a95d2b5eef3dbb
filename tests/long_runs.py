"""Small models of random weights that read long texts, by kinds of attention."""

import torch
from every_task import LABELLED, LABELS, LETTERS, TEXTS
from oracles import shaken

from regard.config.run import Config
from regard.config.text import TextConfig, Tokenization
from regard.data.vocabulary import Vocabularies
from regard.inference.predictor import Predictor
from regard.tasks import make_task

LONG = 16_384
ATTENTIONS = {
    "full": {"attention": "full"},
    "window": {"attention": "window", "window_size": 32},
    "bigbird": {"attention": "bigbird", "block": 32, "random_blocks": 2},
    "linformer": {"attention": "linformer", "slots": 24},
}


def long_predictor(kind, attention, longest=LONG, **own):
    """A model that reads texts of at most so many letters."""
    model = {"kind": kind, "layers": 2, "size": 12, "heads": 2, "feedforward": 8, **ATTENTIONS[attention], **own}
    target = Tokenization(kind="label") if kind == "classifier" else None
    text = TextConfig(source=Tokenization(kind="char"), target=target, max_length=longest)
    config = Config(data=TEXTS if kind == "language model" else LABELLED, model=model, text=text)
    task = make_task(config, Vocabularies(LETTERS, LABELS if target else LETTERS))
    torch.manual_seed(1)
    return Predictor(task, shaken(task.build().eval()))


def long_text(letters, framed=2):
    """A text that is so many tokens long, its frame included."""
    return ("abcdefgh bad cafe " * (1 + letters // 18))[: letters - framed]
