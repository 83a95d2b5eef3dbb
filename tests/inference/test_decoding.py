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
from regard.inference.sampling import sampler, truncate
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


def greedy_slowly(model, source, longest):
    """Token after token the likeliest that may be written, each by a pass over everything before it."""
    tokens = []
    while len(tokens) < longest:
        with torch.no_grad():
            scores = model.logits(collate([Row(source, tokens)]))[0, -1]
        scores[[PAD, BOS]] = -math.inf
        if (best := int(scores.argmax())) == EOS:
            break
        tokens.append(best)
    return tokens


def test_a_beam_of_one_is_greedy(model):
    config = settings(max_extra=9, beam_size=1)
    found = dict(filter(None, beam_search(model, make_sources(*pad_sources(SOURCES), config), config, 1)))
    wanted = [greedy_slowly(model, source, 9) for source in SOURCES]
    assert [found[row][0].tokens for row in range(len(SOURCES))] == wanted
    assert [hypotheses[0].tokens for hypotheses in run(model, SOURCES, config)] == wanted


@pytest.mark.parametrize("changes", [{"beam_size": 3}, {"sample": True}])
def test_more_outputs_than_the_beam_holds_are_those_of_a_wider_beam(model, changes):
    few, many = (run(model, SOURCES, settings(**changes | {"beam_size": beam}), best=5) for beam in (2, 5))
    assert [len(hypotheses) for hypotheses in few] == [5] * len(SOURCES)
    assert [[h.tokens for h in hypotheses] for hypotheses in few] == [[h.tokens for h in some] for some in many]


class Script:
    """A model whose log-probabilities are given for every step, whatever it reads."""

    def __init__(self, *steps):
        self.steps = torch.full((len(steps), VOCAB), -math.inf)
        for number, given in enumerate(steps):
            for token, logprob in given.items():
                self.steps[number, token] = logprob

    def start(self, source, lengths):
        return State(source, torch.zeros(len(source), dtype=torch.long))

    def step(self, tokens, state):
        return self.steps[state.cache], State(state.source, state.cache + 1)


@pytest.mark.parametrize(("later", "wanted"), [(-1.4, [4, 4, 4]), (-1.6, [])])
def test_search_goes_on_as_long_as_the_longest_output_can_win(later, wanted):
    """Ended at once, an output has -1. One of three tokens and <eos> is divided by (5 + 4) / 6: -1.4 becomes -0.93 and
    wins, though of a shorter one it would be -1.05; -1.6 becomes -1.07 and does not."""
    script = Script({EOS: -1.0, 4: later}, {4: 0.0}, {4: 0.0}, {EOS: 0.0})
    ((best,),) = run(script, [[4, EOS]], settings(beam_size=2, max_extra=3, length_penalty=1.0))
    assert best.tokens == wanted
    assert best.score == pytest.approx(max(-1.0, later / 1.5))


@pytest.mark.parametrize("least", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("changes", [{"beam_size": 1}, {"beam_size": 3}, {"sample": True}])
def test_the_shortest_output_has_min_length_tokens(least, changes):
    """Of a model that would rather end at once, and of a limit of five."""
    script = Script(*[{EOS: 0.0, 4: -60.0}] * 7)
    ((best,),) = run(script, [[4, EOS]], settings(max_extra=5, min_length=least, **changes))
    assert best.tokens == [4] * min(least, 5)


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


@pytest.mark.parametrize("changes", [{"beam_size": 1}, {"sample": True}])
def test_tokens_are_told_of_their_own_sentence(model, changes):
    """Also when others have left the batch."""
    told = {number: [] for number in range(len(SOURCES))}
    config = settings(max_ratio=1.5, max_extra=1, **changes)
    found = run(model, SOURCES, config, on_token=lambda number, token, logprob: told[number].append((token, logprob)))
    for number, (hypothesis,) in enumerate(found):
        assert told[number] == list(zip([*hypothesis.tokens, EOS], hypothesis.logprobs, strict=True))


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


def test_every_seed_and_sample_has_draws_of_its_own():
    logprobs = torch.full((1, 64), 1 / 64).log()
    drawn = set()
    for seed, number in itertools.product(range(5), range(5)):
        draw = sampler(settings(sample=True, seed=seed), number)
        drawn.add(tuple(int(draw(logprobs, step)) for step in range(9)))
    assert len(drawn) == 25


def test_sampling_draws_from_the_distribution():
    coin = Coin({4: 0.5, 5: 0.3, EOS: 0.2})
    drawn = run(coin, [[4, EOS]], settings(sample=True, max_extra=1), best=4000)[0]
    share = sum(h.tokens == [4] for h in drawn) / len(drawn)
    assert share == pytest.approx(0.5, abs=0.03)
    again = run(coin, [[4, EOS]], settings(sample=True, max_extra=1), best=5)[0]
    assert [h.tokens for h in again] == [h.tokens for h in drawn[:5]]


def test_draws_have_the_probabilities_that_temperature_and_cuts_leave():
    """By the chi-square of 4,000 draws, whose 99.99th percentile at six degrees of freedom is 27.9."""
    logprobs = torch.tensor([0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.05]).log()[None]
    for changes in ({}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.8}):
        config = settings(sample=True, **changes)
        draw = sampler(config, 0)
        counts = torch.cat([draw(logprobs, step) for step in range(4000)]).bincount(minlength=7)
        wanted = 4000 * truncate(logprobs / config.temperature, config).softmax(-1)[0]
        assert counts[wanted == 0].sum() == 0
        assert ((counts - wanted) ** 2 / wanted)[wanted > 0].sum() < 27.9


@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.9, 1.0])
def test_cuts_are_those_of_transformers(top_k, top_p):
    """Top-p is the share of what top-k has left."""
    warpers = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.randn(13, 101, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 3
    wanted = scores
    if top_k is not None:
        wanted = warpers.TopKLogitsWarper(top_k)(None, wanted)
    if top_p is not None:
        wanted = warpers.TopPLogitsWarper(top_p)(None, wanted)
    assert torch.equal(truncate(scores, settings(sample=True, top_k=top_k, top_p=top_p)), wanted)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.5, "top_p": 0.9}])
def test_a_draw_does_not_hang_on_the_last_bits(changes):
    """A padded batch gives other last bits than a row alone: the same seed must still give the same text."""
    generator, config = torch.Generator().manual_seed(7), settings(sample=True, **changes)
    one, other = sampler(config, 0), sampler(config, 0)
    for step in range(50):
        logprobs = torch.randn(101, 1009, generator=generator).log_softmax(-1)
        near = logprobs * (1 + 1e-6 * torch.randn(logprobs.shape, generator=generator))
        assert torch.equal(one(logprobs, step), other(near, step))


def test_temperature_and_cuts_narrow_the_draw():
    coin = Coin({4: 0.5, 5: 0.3, EOS: 0.2})
    for changes, allowed in (({"top_k": 1}, {4}), ({"top_p": 0.6}, {4, 5}), ({"temperature": 0.01}, {4})):
        drawn = run(coin, [[4, EOS]], settings(sample=True, max_extra=1, **changes), best=300)[0]
        assert {token for h in drawn for token in h.tokens} == allowed
