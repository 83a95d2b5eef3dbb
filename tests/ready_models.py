"""Every kind of model, small and without dropout, with a batch that it can learn from."""

import torch

from regard.config.run import Config
from regard.data.batching import collate
from regard.data.examples import Example, Image, Ledger, Question
from regard.data.images.pixels import make_png
from regard.data.images.shapes import draw_scene
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.tasks import make_task

SMALL = {"size": 16, "feedforward": 24, "heads": 2, "dropout": 0.0}
LABELS = {"source": {"kind": "word"}, "target": {"kind": "label"}}
WORDS = {"source": {"kind": "word"}}
IMAGES = {"image_size": 16, "grid_size": 8, "strides": (2, 2)}
MODELS = {
    "rnn": ({"kind": "rnn", "size": 16, "embedding": 8, "dropout": 0.0}, WORDS),
    "transformer": ({"kind": "transformer", **SMALL, "encoder_layers": 2, "decoder_layers": 2}, WORDS),
    "pointer-generator": (
        {"kind": "transformer", **SMALL, "encoder_layers": 1, "decoder_layers": 1, "pointer_generator": True},
        WORDS,
    ),
    "language model": ({"kind": "language model", **SMALL, "layers": 2, "positions": "rotary"}, WORDS),
    "classifier": ({"kind": "classifier", **SMALL, "layers": 1, "ensemble_size": 2, "conv_window": 1}, LABELS),
    "reader of words": (
        {"kind": "reader", **SMALL, "layers": 2, "answer": "word", "unit": "sentence", "share_layers": True},
        LABELS,
    ),
    "reader of spans": ({"kind": "reader", **SMALL, "layers": 1}, WORDS),
    "captioner": ({"kind": "captioner", **SMALL, "embedding": 8, **IMAGES, "self_attention": (1,)}, WORDS),
    "captioner with a transformer": ({"kind": "captioner", **SMALL, "decoder": "transformer", **IMAGES}, WORDS),
    "image classifier": ({"kind": "image classifier", "dropout": 0.0, **IMAGES}, LABELS),
}
"""Settings of the model and of its text, by name."""
TEXTS = ("red dog runs", "the old cat sees a bird", "blue", "a big bird sees the red dog")


def make_examples(name):
    """Four examples of a model's task."""
    if name == "language model":
        return [Example("", text, "here") for text in TEXTS]
    if name.startswith("reader"):
        sources = [Question("who runs ?", f"{text} . so it is .") for text in TEXTS]
        return [Example(source, source.context.split()[0], "here") for source in sources]
    if name.startswith(("captioner", "image")):
        images = [Image(f"{seed}", data=make_png(draw_scene(seed, 24).pixels)) for seed in range(len(TEXTS))]
        labels = ("animal", "colour") * 2 if name.startswith("image") else TEXTS
        return [Example(image, label, "here") for image, label in zip(images, labels, strict=True)]
    if name == "classifier":
        return [Example(text, ("animal", "colour")[number % 2], "here") for number, text in enumerate(TEXTS)]
    return [Example(text, " ".join(reversed(text.split())), "here") for text in TEXTS]


def prepare_task(name):
    """A model's task and its examples."""
    model, text = MODELS[name]
    data = {"kind": "text", "train": ()} if name == "language model" else {"kind": "tsv", "train": ()}
    config = Config.model_validate({"data": data, "text": {**text, "max_length": 24}, "model": model})
    examples = make_examples(name)
    source = Vocabulary.learn([*(str(one.source) for one in examples), *TEXTS], config.text.source)
    target = source  # of images, that of their captions
    if config.text.target is not None:
        target = Vocabulary.learn([one.target for one in examples], config.text.target)
    return make_task(config, Vocabularies(source, target)), examples


def make_model(name):
    """A model of first weights, ready to be trained."""
    torch.manual_seed(3)
    return prepare_task(name)[0].build().train()


def make_batch(name):
    """Four rows to learn from."""
    task, examples = prepare_task(name)
    rows = task.encode_examples(examples, Ledger())
    if name == "language model":
        return next(task.scoring_batches([example._replace(target=" ".join(TEXTS)) for example in examples]))[0]
    assert len(rows) == len(examples)
    return collate(rows)
