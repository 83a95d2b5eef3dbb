"""Every task, small and untrained: its task object, its model, something to ask it and an answer of its form."""

import torch
from oracles import entries

from regard.config.data import (
    ColumnsData,
    DocumentData,
    LabelledData,
    LineupData,
    ReverseData,
    ShapesData,
    SquadData,
)
from regard.config.run import Config
from regard.config.text import TextConfig, Tokenization
from regard.data.examples import Example, Words
from regard.data.images.pixels import make_png
from regard.data.images.shapes import draw_scene
from regard.data.vocabulary import EOS, Vocabularies, Vocabulary
from regard.tasks import find_task, make_task
from regard.tasks.task import Answer, Token

LETTERS = entries(12)
LABELS = Vocabulary.learn(["good", "bad"], Tokenization(kind="label"))
DRAWING = make_png(draw_scene(1, 24).pixels)
GAME = "Kim 9 1 Lee 2 8 Park 5 5 | first 8 2 second 9 0"
BLOCKS = {"size": 12, "heads": 3, "feedforward": 7}
PAIRS, TEXTS = ReverseData(kind="reverse"), DocumentData(kind="text", train=("x",))
COLUMNS = ColumnsData(kind="columns", train=("x",))
LABELLED, QUESTIONS = LabelledData(kind="labelled", train=("x",)), SquadData(kind="squad", train=("x",))
SHAPES, IMAGES = ShapesData(kind="shapes"), {"image_size": 16, "grid_size": 8, "strides": (2, 2)}
KINDS = {
    "rnn": (PAIRS, {"kind": "rnn", "size": 6, "embedding": 5}),
    "rnn without attention": (PAIRS, {"kind": "rnn", "size": 6, "embedding": 5, "attention": "none"}),
    "rnn with segments": (PAIRS, {"kind": "rnn", "size": 6, "embedding": 5, "normalize": "segments"}),
    "rnn with trees": (PAIRS, {"kind": "rnn", "size": 6, "embedding": 5, "encoder": "projective trees"}),
    "transformer with segments": (
        PAIRS,
        {"kind": "transformer", "normalize": "segments", "encoder_layers": 2, "decoder_layers": 1, **BLOCKS},
    ),
    "transformer with trees": (
        PAIRS,
        {"kind": "transformer", "normalize": "nonprojective trees", "encoder_layers": 2, "decoder_layers": 1, **BLOCKS},
    ),
    "transformer": (PAIRS, {"kind": "transformer", "encoder_layers": 2, "decoder_layers": 1, **BLOCKS}),
    "pointer-generator": (
        PAIRS,
        {"kind": "transformer", "pointer_generator": True, "encoder_layers": 1, "decoder_layers": 2, **BLOCKS},
    ),
    "language model": (TEXTS, {"kind": "language model", "layers": 2, **BLOCKS}),
    "encoder": (LABELLED, {"kind": "encoder", "layers": 2, **BLOCKS}),
    "classifier": (LABELLED, {"kind": "classifier", "layers": 2, **BLOCKS}),
    "classifier with matchings": (LABELLED, {"kind": "classifier", "layers": 2, "normalize": "matching", **BLOCKS}),
    "ensemble": (LABELLED, {"kind": "classifier", "layers": 1, "ensemble_size": 2, **BLOCKS}),
    "classifier by the mean": (LABELLED, {"kind": "classifier", "layers": 1, "pooling": "mean", **BLOCKS}),
    "reader of spans": (QUESTIONS, {"kind": "reader", "layers": 2, **BLOCKS}),
    "reader of words": (QUESTIONS, {"kind": "reader", "layers": 2, "answer": "word", **BLOCKS}),
    "reader of sentences": (
        QUESTIONS,
        {"kind": "reader", "layers": 2, "answer": "word", "unit": "sentence", "share_layers": True, **BLOCKS},
    ),
    "tagger": (COLUMNS, {"kind": "tagger", "layers": 2, "encoder": "transformer", **BLOCKS}),
    "tagger over features": (COLUMNS, {"kind": "tagger", "structure": "memm"}),
    "tagger over sub-words": (
        COLUMNS,
        {"kind": "tagger", "layers": 2, "encoder": "transformer", "pretrained": "x", **BLOCKS},
    ),
    "lineup": (LineupData(kind="lineup"), {"kind": "lineup", "skills": 2}),
    "captioner": (SHAPES, {"kind": "captioner", "layers": 1, "embedding": 5, **IMAGES, **BLOCKS}),
    "captioner without attention": (SHAPES, {"kind": "captioner", "spatial_attention": "none", **IMAGES, **BLOCKS}),
    "captioner with a transformer": (
        SHAPES,
        {"kind": "captioner", "decoder": "transformer", "layers": 2, **IMAGES, **BLOCKS},
    ),
    "captioner with self-attention": (SHAPES, {"kind": "captioner", "self_attention": (1,), **IMAGES, **BLOCKS}),
    "image classifier": (SHAPES, {"kind": "image classifier", "self_attention": (1,), **IMAGES}),
}
LABELLED_KINDS = (
    "classifier",
    "classifier with matchings",
    "ensemble",
    "classifier by the mean",
    "reader of words",
    "reader of sentences",
    "image classifier",
)


def made(kind):
    """A task and its model."""
    data, model = KINDS[kind]
    target = Tokenization(kind="label") if kind in LABELLED_KINDS else None
    if data is COLUMNS:
        target = Tokenization(kind="label", separator=" ")
    words = kind == "lineup"
    text = TextConfig(source=Tokenization(kind="word" if words else "char"), target=target, max_length=30)
    config = Config(data=data, model=model, text=text)
    read = Vocabulary.learn([GAME], text.source) if words else LETTERS
    vocabularies = Vocabularies(read, LABELS if target else read)
    if data is COLUMNS:
        sentence = Example(Words(("abc", "de", "f")), "bad good bad", "x:1")
        vocabularies = find_task(config).learn_vocabularies(config, [sentence], [])
        if config.model.pretrained:
            vocabularies = vocabularies._replace(source=LETTERS)
    task = make_task(config, vocabularies)
    torch.manual_seed(1)
    return task, task.build().eval()


def a_source(task):
    """Something that a task can be asked, by the fields of its form."""
    text = {"image": DRAWING}.get(task.form.fields[0]["name"], GAME if task.settings.kind == "lineup" else "abc de")
    return task.make_source({field["name"]: text for field in task.form.fields})


def an_answer(task):
    """An answer of the form that a task's have."""
    written = [Token("a", -1.0, 4), Token("b", -1.0, 5), Token("", -1.0, EOS)]
    return Answer("ab", -1.0, written if task.form.answer == "line" else [])
