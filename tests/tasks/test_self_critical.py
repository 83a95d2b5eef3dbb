"""Training on CIDEr-D: what is sampled, what it is worth, and which way it moves a model."""

import itertools

import pytest
import torch
from images import SCENES, SMALL
from oracles import exact as exact
from test_captioning import WORDS, images, made
from torch.testing import assert_close

from regard.config.data import ShapesData
from regard.config.run import Config, DecodeConfig, TrainConfig
from regard.config.text import TextConfig
from regard.config.toml import read
from regard.data.batching import Batch, Row, collate, pad_sources
from regard.data.vocabulary import BOS, EOS, PAD, Vocabularies
from regard.errors import ConfigError
from regard.evaluation.fit import fit
from regard.inference.predictor import Predictor
from regard.tasks import make_task
from regard.tasks.vision.caption_metrics import count_documents, score_cider
from regard.tasks.vision.model import UNSAID
from regard.tasks.vision.self_critical import Critic, write_captions
from regard.training.checkpoint import load_tensors
from regard.training.prepare import resume_run, start_run

TEXTS = ["red circle above blue square", "green star below blue circle", "red star and green square"]


def make_rows(task):
    """Two captions of each of three images."""
    pictures = [one.ids for one in task.encode(images(3))]
    targets = [WORDS.encode(text).ids for text in [*TEXTS, *reversed(TEXTS)]]
    return [Row(pictures[number % 3], ids) for number, ids in enumerate(targets)]


def test_greedy_captions_are_those_of_the_search():
    task, model = made()
    source, lengths = pad_sources([one.ids for one in task.encode(images(3))])
    best, _ = write_captions(model, source, lengths, 9, 1, greedy=True)
    settings = DecodeConfig(beam_size=1)
    found = Predictor(task, model).predict(images(3), settings=settings)
    assert [WORDS.decode(ids) for ids in best] == [answers[0].text for answers in found]
    short, drawn = write_captions(model, source, lengths, 2, 4, greedy=True)
    assert all(len(ids) <= 2 for ids in [*short, *drawn])
    assert short == [ids[:2] for ids in best]
    assert (len(short), len(drawn)) == (3, 12)


@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_samples_come_as_often_as_they_are_likely(kind, samples):
    """First and second words of many samples, against the model's own probabilities."""
    torch.manual_seed(5)
    task, model = made(decoder=kind)
    picture = task.encode(images(1))[0].ids
    count = 4000
    source, lengths = pad_sources([picture] * (count // samples))
    _, drawn = write_captions(model, source, lengths, 2, samples, greedy=samples == 1)
    pairs = [(*ids, EOS)[:2] if ids else (EOS,) for ids in drawn]
    with torch.no_grad():
        state = model.start(source[:1], lengths[:1])
        first, state = model.step(torch.tensor([BOS]), state)
    first[:, [PAD, 1, BOS]] = -torch.inf
    chances = first[0].softmax(-1)
    for word in range(WORDS.size):
        share, wanted = sum(pair[0] == word for pair in pairs) / count, float(chances[word])
        assert abs(share - wanted) <= 5 * (wanted * (1 - wanted) / count) ** 0.5 + 1e-9
    likely = int(chances[4:].argmax()) + 4
    with torch.no_grad():
        second = model.step(torch.tensor([likely]), state)[0]
    second[:, [PAD, 1, BOS]] = -torch.inf
    after = [pair[1] for pair in pairs if pair[0] == likely]
    for word in range(WORDS.size):
        share, wanted = after.count(word) / len(after), float(second[0].softmax(-1)[word])
        assert abs(share - wanted) <= 5 * (wanted * (1 - wanted) / len(after)) ** 0.5 + 1e-9


def test_rewards_are_differences_of_cider():
    torch.manual_seed(2)
    task, model = made()
    rows = make_rows(task)
    critic = Critic(rows, WORDS)
    torch.manual_seed(3)
    batch = critic.judge(model, rows[:3])
    torch.manual_seed(3)
    best, drawn = write_captions(model.eval(), batch.source, batch.lengths, 6, 1, greedy=True)
    references = [[TEXTS[n], TEXTS[2 - n]] for n in range(3)]
    known = count_documents(references)
    scores = [score_cider([WORDS.decode(ids) for ids in some], references, known).each for some in (drawn, best)]
    assert_close(batch.rewards, torch.tensor(scores[0]) - torch.tensor(scores[1]))
    for answer, target, ids in zip(batch.answer.tolist(), batch.target.tolist(), drawn, strict=True):
        wanted = [*ids, EOS][:6]  # five words and <eos>: a caption that was cut has drawn none
        assert answer[: len(wanted)] == wanted
        assert target[: len(wanted)] == [BOS, *wanted[:-1]]
    assert model.training is False or model.train() is model


def test_several_samples_are_compared_with_the_mean_of_the_others():
    torch.manual_seed(2)
    task, model = made()
    rows = make_rows(task)
    critic = Critic(rows, WORDS)
    batch = critic.judge(model, rows, 2)  # six rows: two samples of each of three images
    captions = [[token for token in row if token not in (PAD, EOS)] for row in batch.answer.tolist()]
    references = [[TEXTS[n], TEXTS[2 - n]] for n in (0, 0, 1, 1, 2, 2)]
    scores = score_cider([WORDS.decode(ids) for ids in captions], references, count_documents(references[::2])).each
    others = [scores[number ^ 1] for number in range(6)]
    assert_close(batch.rewards, torch.tensor(scores) - torch.tensor(others))
    assert_close(critic.judge(model, rows, 5).rewards.sum(), torch.tensor(0.0), atol=1e-5, rtol=0)
    assert len(critic.judge(model, rows[:2], 5).answer) == 5


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_an_equal_reward_of_all_captions_moves_nothing(kind):
    """The sum of p(caption) times its gradient is zero over all captions: the loss knows the probabilities that
    captions are drawn with, without dropout, and without what is never said."""
    torch.manual_seed(4)
    task, model = made(decoder=kind, dropout=0.5)
    model.train()
    picture = task.encode(images(1))[0].ids
    words = [one for one in range(WORDS.size) if one not in UNSAID]
    source, lengths = pad_sources([picture] * len(words))
    answer = torch.tensor(words)[:, None]  # all captions of one token, <eos> among them
    batch = Batch(source, lengths, torch.full_like(answer, BOS), answer)
    model.eval()
    with torch.no_grad():
        logprobs, _ = model.step(torch.tensor([BOS]), model.start(source[:1], lengths[:1]))
        logprobs[:, UNSAID] = -torch.inf
        chances = logprobs.softmax(-1)[0, words]
    model.train()
    model(batch._replace(rewards=-chances)).total.backward()
    assert model.output.bias.grad.abs().max() < 1e-9
    assert model.project.weight.grad.abs().max() < 1e-9


def test_the_loss_weighs_captions_by_their_rewards():
    task, model = made()
    batch = collate(make_rows(task)[:3])
    rewards = torch.tensor([0.5, -2.0, 0.0])
    total = model(batch._replace(rewards=rewards)).total
    nats = torch.stack([model(collate([row])._replace(rewards=torch.ones(1))).total for row in make_rows(task)[:3]])
    assert_close(total, (nats * rewards).sum(), rtol=1e-4, atol=1e-4)
    assert (nats < torch.stack([model(collate([row])).total for row in make_rows(task)[:3]])).all()


def test_the_last_updates_are_sampled_and_earlier_ones_not():
    task, _ = made()
    config = Config(
        data=ShapesData(kind="shapes"),
        text=TextConfig(max_length=9),
        model=task.settings.model_copy(update={"self_critical_steps": 2}),
        train=TrainConfig(steps=5, batch_tokens=64),
    )
    task = make_task(config, Vocabularies(WORDS, WORDS))
    model = task.build()
    task.freeze(model)
    rows = make_rows(task)
    updates = list(itertools.islice(task.batches(rows, 0), 5))
    assert [batch.rewards is None for (batch,) in updates] == [True, True, True, False, False]
    assert model.training
    (later,) = next(iter(task.batches(rows, 4)))
    assert later.rewards is not None
    assert torch.equal(later.source, updates[4][0].source)  # the same images, wherever training began


@pytest.mark.parametrize("samples", [1, 3])
def test_captions_get_better_by_their_own_scores(samples):
    """A model that knows nothing but how to write gets a higher CIDEr-D by rewards alone."""
    torch.manual_seed(1)
    task, model = made(size=24, embedding=12)
    torch.nn.init.normal_(model.output.bias, std=0.1)
    rows = make_rows(task)
    critic = Critic(rows, WORDS)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def mean():
        source, lengths = pad_sources([row.source for row in rows[:3]])
        best, _ = write_captions(model.eval(), source, lengths, 6, 1, greedy=True)
        return float(critic.score(best, [row.source.image for row in rows[:3]]).mean())

    before = mean()
    for _ in range(120):
        optimizer.zero_grad()
        model(critic.judge(model, rows, samples)).total.backward()
        optimizer.step()
    assert mean() > before + 0.5


def test_a_training_that_was_stopped_while_it_samples_goes_on_bit_for_bit(tmp_path):
    """What an update samples is drawn when the update is made, not before."""
    changes = [*SMALL, *SCENES, "model.self_critical_steps=4", "train.steps=6", "train.validate_every=6"]
    config = read("shapes", changes)
    whole, parts, done = tmp_path / "whole", tmp_path / "parts", []
    fit(start_run(config, whole), whole, lambda event: None, device="cpu")
    stop = lambda: len(done) >= 4  # noqa: E731
    note = lambda event: done.append(event) if event.kind == "step" else None  # noqa: E731
    fit(start_run(config, parts), parts, note, device="cpu", stop=stop)
    fit(resume_run(parts), parts, lambda event: None, device="cpu")
    left, right = (load_tensors(folder / "model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_the_last_updates_are_not_known_of_a_training_by_the_clock():
    with pytest.raises(ConfigError, match=r"self_critical_steps are the last of train\.steps: leave"):
        read("shapes", ["model.self_critical_steps=4", "train.minutes=1"])
