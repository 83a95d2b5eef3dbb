"""Search against brute force, against itself in other batches, and its limits."""

import itertools
import math

import pytest
import torch
from decoders import SOURCES, VOCAB, run, settings
from decoders import model as model

from regard.data.batching import Row, collate, pad_sources
from regard.data.vocabulary import BOS, EOS, PAD
from regard.inference.beam_search import Beams, beam_search, expand
from regard.inference.constraints import make_sources, repeated_ngrams
from regard.nn.state import State


def logprobs(model, source, outputs):
    """log P of every token of every output and of its <eos>, by one forward pass without any cache."""
    batch = collate([Row(source, list(tokens)) for tokens in outputs])
    with torch.no_grad():
        values = model.logits(batch).log_softmax(-1).gather(-1, batch.answer[..., None]).squeeze(-1)
    return [row[: len(tokens) + 1].tolist() for row, tokens in zip(values, outputs, strict=True)]


def every_output(model, source, longest, alpha):
    """All outputs there are, best first: the oracle of search."""
    words = [token for token in range(VOCAB) if token not in (PAD, BOS, EOS)]
    outputs = [list(o) for length in range(longest + 1) for o in itertools.product(words, repeat=length)]
    values = logprobs(model, source, outputs)
    scores = [sum(row) / ((5 + len(row)) / 6) ** alpha for row in values]
    return sorted(zip(scores, outputs, strict=True), reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
def test_a_wide_beam_is_brute_force(model, alpha):
    config = settings(beam_size=200, length_penalty=alpha)
    for source, hypotheses in zip(SOURCES[:3], run(model, SOURCES[:3], config, best=5), strict=True):
        wanted = every_output(model, source, 3, alpha)[:5]
        assert [h.tokens for h in hypotheses] == [tokens for _, tokens in wanted]
        assert [h.score for h in hypotheses] == pytest.approx([score for score, _ in wanted], abs=1e-9)


def test_a_beam_of_one_is_greedy(model):
    longer = settings(max_extra=9)
    greedy = run(model, SOURCES, longer.model_copy(update={"beam_size": 1}))
    wide = run(model, SOURCES, longer.model_copy(update={"beam_size": 1}), best=1)
    with torch.inference_mode():
        narrow = longer.model_copy(update={"beam_size": 1})
        beam = dict(filter(None, beam_search(model, make_sources(*pad_sources(SOURCES), longer), narrow, 1)))
    assert [h[0].tokens for h in greedy] == [h[0].tokens for h in wide]
    assert [h[0].tokens for h in greedy] == [beam[row][0].tokens for row in range(len(SOURCES))]


@pytest.mark.parametrize(
    "changes",
    [{"beam_size": 1}, {"beam_size": 3}, {"sample": True, "top_k": 5}, {"beam_size": 4, "no_repeat_ngram": 2}],
)
def test_batched_and_padded_is_alone(model, changes):
    config = settings(max_ratio=1.5, **changes)
    together = run(model, SOURCES, config, best=2)
    for source, hypotheses in zip(SOURCES, together, strict=True):
        (alone,) = run(model, [source], config, best=2)
        assert [h.tokens for h in alone] == [h.tokens for h in hypotheses]
        assert [h.score for h in alone] == pytest.approx([h.score for h in hypotheses], abs=1e-9)


@pytest.mark.parametrize("changes", [{"beam_size": 1}, {"beam_size": 3}, {"sample": True}])
def test_cached_scores_are_those_of_the_whole_output(model, changes):
    for source, hypotheses in zip(SOURCES, run(model, SOURCES, settings(**changes), best=1), strict=True):
        assert hypotheses[0].logprobs == pytest.approx(logprobs(model, source, [hypotheses[0].tokens])[0], abs=1e-9)


def test_a_wider_beam_never_scores_worse_than_brute_force_allows(model):
    for source in SOURCES[:3]:
        best = every_output(model, source, 3, 0.6)[0][0]
        for beam in (1, 2, 4):
            assert run(model, [source], settings(beam_size=beam))[0][0].score <= best + 1e-5


@pytest.mark.parametrize("changes", [{"beam_size": 1}, {"beam_size": 3}, {"sample": True}])
def test_forced_prefix_and_limits(model, changes):
    config = settings(max_ratio=1.0, max_extra=1, **changes)
    prefixes = [[5, 6], [], [4, 4, 4], [6]]
    for source, prefix, hypotheses in zip(
        SOURCES, prefixes, run(model, SOURCES, config, prefixes=prefixes), strict=True
    ):
        tokens = hypotheses[0].tokens
        assert tokens[: len(prefix)] == prefix
        assert len(tokens) <= max(len(source) + 1, len(prefix))
        assert not {PAD, BOS, EOS} & set(tokens)


def test_no_repeat(model):
    config = settings(max_extra=12, no_repeat_ngram=2, length_penalty=2.0)
    for hypotheses in run(model, SOURCES, config, best=3):
        for hypothesis in hypotheses:
            grams = list(itertools.pairwise(hypothesis.tokens))
            assert len(grams) == len(set(grams))
    assert repeated_ngrams([4, 5, 4], 2) == [5]
    assert repeated_ngrams([4, 5, 6, 4, 5], 3) == [6]
    assert repeated_ngrams([4], 3) == []
    assert repeated_ngrams([4, 5], 1) == [4, 5]


@pytest.mark.parametrize("changes", [{"beam_size": 1}, {"beam_size": 3}, {"sample": True}])
def test_limits_that_contradict_each_other_still_give_an_answer(model, changes):
    """Nothing may come twice, and yet more is wanted than there are tokens: then the output ends. A prefix is kept,
    whatever it repeats."""
    config = settings(max_ratio=0.0, max_extra=40, no_repeat_ngram=1, min_length=30, **changes)
    for hypotheses in run(model, SOURCES, config, prefixes=[[4, 4]] * len(SOURCES)):
        assert hypotheses[0].tokens[:2] == [4, 4]
        assert all(math.isfinite(logprob) for logprob in hypotheses[0].logprobs)
        assert len(set(hypotheses[0].tokens[1:])) == len(hypotheses[0].tokens) - 1


@pytest.mark.parametrize(
    ("sentences", "beam", "vocab", "width"), [(3, 2, 5000, 7), (2, 5, 64 * 41, 5), (1, 1, 9000, 4), (5, 3, 70, 6)]
)
def test_continuations_are_the_likeliest_of_all(sentences, beam, vocab, width):
    generator = torch.Generator().manual_seed(vocab)
    logprobs = torch.randn(sentences * beam, vocab, generator=generator)
    logprobs[:, :: vocab // 9] = -math.inf
    logprobs[0, -3:] = torch.tensor([7.0, 9.0, 8.0])
    tokens = torch.arange(sentences * beam * 2).view(sentences, beam, 2)
    beams = Beams(tokens, tokens.float(), torch.randn(sentences, beam, generator=generator))
    totals = logprobs.view(sentences, beam, vocab) + beams.scores[..., None]
    wanted, places = totals.flatten(1).topk(width)
    origin, found = expand(beams, logprobs, width)
    assert torch.equal(found.scores, wanted)
    assert torch.equal(origin, places // vocab)
    rows = torch.arange(sentences)[:, None]
    assert torch.equal(found.tokens, torch.cat([tokens[rows, origin], places[..., None] % vocab], dim=-1))
    assert torch.equal(found.logprobs[..., -1], logprobs.view(sentences, -1).gather(1, places))


class Coin:
    """A model of two words whose next-token distribution is given."""

    def __init__(self, probabilities):
        self.logprobs = torch.full((VOCAB,), -math.inf)
        for token, probability in probabilities.items():
            self.logprobs[token] = math.log(probability)

    def start(self, source, lengths):
        return State(source, source)

    def step(self, tokens, state):
        return self.logprobs.expand(len(tokens), -1).clone(), state


def test_sampling_draws_from_the_distribution():
    coin = Coin({4: 0.5, 5: 0.3, EOS: 0.2})
    drawn = run(coin, [[4, EOS]], settings(sample=True, max_extra=1), best=4000)[0]
    share = sum(h.tokens == [4] for h in drawn) / len(drawn)
    assert share == pytest.approx(0.5, abs=0.03)
    again = run(coin, [[4, EOS]], settings(sample=True, max_extra=1), best=5)[0]
    assert [h.tokens for h in again] == [h.tokens for h in drawn[:5]]


def test_temperature_and_cuts_narrow_the_draw():
    coin = Coin({4: 0.5, 5: 0.3, EOS: 0.2})
    for changes, allowed in (({"top_k": 1}, {4}), ({"top_p": 0.6}, {4, 5}), ({"temperature": 0.01}, {4})):
        drawn = run(coin, [[4, EOS]], settings(sample=True, max_extra=1, **changes), best=300)[0]
        assert {token for h in drawn for token in h.tokens} == allowed
