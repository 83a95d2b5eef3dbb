"""Small taggers: models by hand, and runs on a few sentences."""

import itertools

import torch

import regard
from regard.config.structure import TaggerConfig
from regard.config.toml import validate
from regard.data.batching import Batch
from regard.data.vocabulary import SPECIAL, Vocabularies, Vocabulary
from regard.tasks import make_task
from regard.tasks.tagging.model import Tagger
from regard.training.checkpoint import create_run, get_weights, save_weights

LABELS = len(SPECIAL)
CHUNKS = """The DT B-NP
dog NN I-NP
ran VBD B-VP
. . O

She PRP B-NP
saw VBD B-VP
the DT B-NP
old JJ I-NP
dog NN I-NP
. . O

Dogs NNS B-NP
ran VBD B-VP
. . O
"""


def tagger(structure="crf", tags=3, features=9, width=2, seed=7, **settings):
    """A tagger whose every weight is drawn."""
    torch.manual_seed(seed)
    sizes = {"size": 12, "heads": 3, "feedforward": 7, "dropout": 0.0}
    config = TaggerConfig(kind="tagger", structure=structure, **(sizes | {"features": ("word[0]",)} | settings))
    model = Tagger(config, features, tags, width, 30)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.8)
    with torch.no_grad():
        model.bag.weight[0] = 0.0
    return model.eval()


def batch(model, lengths, tags=3, seed=3):
    """Sentences of so many words, with tags."""
    generator = torch.Generator().manual_seed(seed)
    n = max(lengths)
    source = torch.randint(1, model.bag.num_embeddings, (len(lengths), n * model.width), generator=generator)
    answer = torch.randint(tags, (len(lengths), n), generator=generator) + LABELS
    lengths = torch.tensor(lengths)
    real = torch.arange(n) < lengths[:, None]
    source = source.masked_fill(~real.repeat_interleave(model.width, 1), 0)
    return Batch(source, lengths * model.width, answer.masked_fill(~real, 0), answer.masked_fill(~real, 0))


def enumerate_taggings(model, given, row):
    """Every tagging of one sentence and its probability, by the definitions: of a CRF, of whole taggings; of an MEMM,
    step by step over what is allowed and does not lead nowhere."""
    n = int(given.lengths[row]) // model.width
    with torch.no_grad():
        scores = model.word_scores(given)[0][row].tolist()
    start, end, moves = model.start.tolist(), model.end.tolist(), model.transitions.tolist()
    if model.structure == "softmax":
        start, end, moves = [0.0] * len(start), [0.0] * len(end), [[0.0] * len(end) for _ in end]
    allowed, tags = model.allowed.tolist(), range(len(start))

    def valid(path):
        return all(allowed[a][b] for a, b in itertools.pairwise([-1, *path, -1]))

    every = [path for path in itertools.product(tags, repeat=n) if valid(path)]
    if model.structure != "memm":
        sums = [
            (start[path[0]] + end[path[-1]] if path else 0.0)
            + sum(scores[t][tag] for t, tag in enumerate(path))
            + sum(moves[a][b] for a, b in itertools.pairwise(path))
            for path in every
        ]
        return dict(zip(every, torch.tensor(sums, dtype=torch.float64).softmax(0).tolist(), strict=True))
    found = {}
    for path in every:
        chance = 1.0
        for t, tag in enumerate(path):
            before = start if t == 0 else moves[path[t - 1]]
            open_ = {other[t] for other in every if other[:t] == path[:t]}
            raised = {one: torch.tensor(scores[t][one] + before[one], dtype=torch.float64).exp() for one in open_}
            chance *= float(raised[tag] / sum(raised.values()))
        found[path] = chance
    return found


def settings(data, **model):
    """A run on a file of columns, validated on the same."""
    return validate(
        {
            "data": {"kind": "columns", "train": [str(data)], "valid": [str(data)], "features": {"pos": 1}},
            "text": {"source": {"kind": "word"}, "target": {"kind": "label", "separator": " "}, "max_length": 30},
            "model": {"kind": "tagger", "features": ["word[0]", "pos[0]", "pos[-1]"], "l2": 0.01, **model},
            "train": {"steps": 30, "learning_rate": 0.01, "batch_tokens": 64, "precision": "float32"},
            "evaluate": {"metrics": ["span_f1", "accuracy", "accuracy_known", "accuracy_unknown", "perplexity"]},
        },
        "test",
    )


def train(config, run, report=lambda event: None, stop=lambda: False):
    """A run of these settings, and its predictor."""
    regard.fit(regard.start_run(config, run), run, report, device="cpu", stop=stop)
    return regard.load(run, device="cpu")


def draw_encoder(run):
    """The run of an encoder whose weights are drawn: most words of CHUNKS are several of its sub-words."""
    config = validate(
        {
            "data": {"kind": "text", "train": ()},
            "text": {"source": {"kind": "bpe", "size": 275}, "max_length": 40},
            "model": {"kind": "encoder", "size": 12, "heads": 3, "feedforward": 7, "layers": 2, "positions": "learned"},
        },
        "test",
    )
    vocabulary = Vocabulary.learn(CHUNKS.split(), config.text.source)
    vocabularies = Vocabularies(vocabulary, vocabulary)
    torch.manual_seed(11)
    model = make_task(config, vocabularies).build()
    create_run(run, config, vocabularies, {})
    save_weights(run / "model.safetensors", get_weights(model), 0)
    return run
