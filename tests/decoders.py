"""Small models that write, opinionated and in float64: what search is tested on."""

import pytest
import torch

from regard.config.model import RNNConfig, TransformerConfig
from regard.config.run import DecodeConfig
from regard.data.batching import pad_sources
from regard.data.vocabulary import EOS
from regard.inference.constraints import make_sources
from regard.inference.sampling import generate
from regard.tasks.seq2seq import RecurrentSeq2Seq, Transformer

VOCAB = 7  # four special tokens and three words
FAMILIES = {
    "plain rnn": RNNConfig(kind="rnn", cell="rnn", size=6, embedding=5, attention="none", layers=2),
    "gru": RNNConfig(kind="rnn", cell="gru", size=6, embedding=5, attention="additive"),
    "lstm": RNNConfig(kind="rnn", cell="lstm", size=6, embedding=5, attention="general", bidirectional=False),
    "transformer": TransformerConfig(
        kind="transformer", size=12, feedforward=7, heads=3, encoder_layers=2, decoder_layers=2
    ),
    "rotary": TransformerConfig(
        kind="transformer", size=12, feedforward=7, heads=2, encoder_layers=1, decoder_layers=2, positions="rotary"
    ),
    "alibi": TransformerConfig(
        kind="transformer", size=12, feedforward=7, heads=3, encoder_layers=1, decoder_layers=1, positions="alibi"
    ),
    "grouped": TransformerConfig(
        kind="transformer", size=12, feedforward=7, heads=6, kv_heads=2, encoder_layers=1, decoder_layers=1, gated=True
    ),
}
SOURCES = [[4, 5, EOS], [6, EOS], [5, 5, 4, 6, 4, EOS], [4, EOS]]


@pytest.fixture(params=FAMILIES)
def model(request):
    torch.manual_seed(3)
    config = FAMILIES[request.param]
    made = (RecurrentSeq2Seq if isinstance(config, RNNConfig) else Transformer)(config, VOCAB, VOCAB).double().eval()
    with torch.no_grad():  # untrained models hardly care what they read: make them opinionated
        for parameter in made.parameters():
            parameter.mul_(3)
    return made


def settings(**changes):
    return DecodeConfig(**{"max_ratio": 0.0, "max_extra": 3, "length_penalty": 0.6, **changes})


def decode(model, source, lengths, config, *, prefixes=None, most=None, **options):
    """The `best` outputs of every source (sentences, source), best first."""
    steps = generate(model, make_sources(source, lengths, config, prefixes, most), config, **options)
    found = dict(filter(None, steps))
    return [found[row] for row in range(len(source))]


def run(model, sources, config, **options):
    return decode(model, *pad_sources(sources), config, **options)
