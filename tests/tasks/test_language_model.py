"""Language models: cached as uncached, together as alone, windows that read every token once, text that streams."""

import itertools
import json

import pytest
import torch
from conftest import tiny_language
from decoders import decode
from models import build
from oracles import EXACT, entries, shaken
from oracles import exact as exact
from torch.nn import functional
from torch.testing import assert_close

import regard
from regard.config.data import DocumentData
from regard.config.model import LanguageModelConfig
from regard.config.run import Config, DecodeConfig, TrainConfig
from regard.config.text import TextConfig, Tokenization
from regard.data.batching import Batch, Row, plan_windows, read_windows
from regard.data.examples import Example
from regard.data.vocabulary import BOS, EOS, PAD, Vocabularies, Vocabulary
from regard.errors import DataError, InputError
from regard.nn.state import Hypothesis, State
from regard.tasks import make_task
from regard.training.prepare import read_examples

WORDS, CONTEXT = entries(11), 9
POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "none"]
KINDS = {
    **{positions: {"positions": positions} for positions in POSITIONS},
    "llama": {
        "positions": "rotary",
        "norm_kind": "rms",
        "gated": True,
        "bias": False,
        "kv_heads": 1,
        "tie_embeddings": False,
    },
    "post": {"norm": "post", "positions": "learned", "embedding_norm": True, "embedding_scale": False},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def read(**changes):
    sizes = {"size": 12, "heads": 3, "feedforward": 7, "layers": 2, "dropout": 0.0}
    settings = LanguageModelConfig(kind="language model", **sizes | changes)
    data = DocumentData(kind="text", train=("x",))
    return Config(data=data, model=settings, text=TextConfig(max_length=CONTEXT))


def made(kind):
    return shaken(build(read(**KINDS[kind]), WORDS))


def uncached(model, ids):
    """Log-probabilities of what comes after each of ids, read at once."""
    row = torch.tensor([ids])
    return model.logits(Batch(row[:, :0], torch.zeros(1), row, row)).log_softmax(-1)[0].detach()


@pytest.mark.usefixtures("exact")
@every_kind
def test_cached_is_uncached(kind):
    model, ids = made(kind), [4, 8, 5, 10, 6, 4, 7]
    wanted = uncached(model, ids)
    state = model.start(torch.tensor([ids[:3]]), torch.tensor([3]))
    assert state.first.tolist() == [ids[2]]
    for place in range(2, len(ids)):
        found, state = model.step(torch.tensor([ids[place]]), state)
        assert_close(found[0], wanted[place], **EXACT)


@pytest.mark.usefixtures("exact")
@every_kind
def test_prompts_together_are_as_alone(kind):
    model, prompts = made(kind), [[4, 8, 5], [6], [10, 4, 7, 9, 5]]
    ids = torch.tensor([[*prompt, *[0] * (5 - len(prompt))] for prompt in prompts])
    state = model.start(ids, torch.tensor([3, 1, 5]))
    tokens, histories = state.first, [list(prompt) for prompt in prompts]
    for _ in range(4):
        found, state = model.step(tokens, state)
        for row, history in enumerate(histories):
            assert_close(found[row], uncached(model, history)[-1], **EXACT)
        tokens = found.argmax(-1)
        for history, token in zip(histories, tokens.tolist(), strict=True):
            history.append(token)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["rotary", "alibi", "llama"])
def test_what_slides_forgets_the_oldest_and_stays_bounded(kind):
    """With one layer, a cache of the last tokens is what a model sees that reads only those, wherever it begins."""
    model = made(kind)
    model.decoder.blocks = model.decoder.blocks[:1]
    ids = [4 + place * 5 % 7 for place in range(3 * CONTEXT)]
    state = model.start(torch.tensor([ids[:2]]), torch.tensor([2]))
    for place in range(1, len(ids)):
        found, state = model.step(torch.tensor([ids[place]]), state)
        assert state.cache.length <= CONTEXT
        assert_close(found[0], uncached(model, ids[max(0, place + 1 - CONTEXT) : place + 1])[-1], **EXACT)


@pytest.mark.usefixtures("exact")
def test_beams_and_greedy_continue_a_prompt():
    model = made("rotary")
    source, lengths = torch.tensor([[4, 8, 5], [6, 0, 0]]), torch.tensor([3, 1])
    settings = DecodeConfig(beam_size=1, max_ratio=0.0, max_extra=4, length_penalty=0.0)
    outputs = decode(model, source, lengths, settings)
    for row, ((found,), prompt) in enumerate(zip(outputs, ([4, 8, 5], [6]), strict=True)):
        text = list(prompt)
        for token, logprob in zip([*found.tokens, 3], found.logprobs, strict=True):
            wanted = uncached(model, text)[-1]
            assert float(wanted[token]) == pytest.approx(logprob, abs=1e-9), row
            text.append(token)
    wide = settings.model_copy(update={"beam_size": 400, "max_extra": 2})
    (best, *_), _ = decode(model, source, lengths, wide)
    scores = {}
    for length in range(3):
        for tokens in itertools.product([1, *range(4, WORDS.size)], repeat=length):
            wanted = uncached(model, [4, 8, 5, *tokens])
            scores[tokens] = float(sum(wanted[2 + i, t] for i, t in enumerate([*tokens, 3])))
    assert best.score == pytest.approx(max(scores.values()), abs=1e-9)
    assert scores[tuple(best.tokens)] == max(scores.values())


@pytest.mark.usefixtures("exact")
def test_the_loss_is_the_surprise_of_every_next_token():
    model, row = made("learned"), torch.tensor([[4, 8, 5, 10, 3], [6, 4, 4, 9, 0]])
    batch = Batch(row[:, :0], torch.zeros(2), row[:, :-1], row[:, 1:])
    loss = model(batch)
    wanted = functional.cross_entropy(
        model.logits(batch).flatten(0, 1), row[:, 1:].flatten(), ignore_index=0, reduction="sum"
    )
    assert_close(loss.plain, wanted, **EXACT)
    assert loss.tokens == 7
    found = model.surprise(batch)
    assert_close(found.nats.sum(), wanted, **EXACT)
    assert found.tokens.tolist() == [4, 3]


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [240, 239, 241, 285, 9, 8, 7, 2])
def test_an_epoch_wants_every_token_once_and_rows_go_on(tokens):
    """Whatever their number; windows are at most one token narrower than others."""
    stream, config = list(range(1000, 1000 + tokens)), TrainConfig(batch_tokens=48)
    rows, each = plan_windows(tokens, 8, 48)
    found = [batch for (batch,) in itertools.islice(read_windows(stream, 8, config, 0), 3 * each)]
    for epoch in (found[:each], found[each : 2 * each], found[2 * each :]):
        wanted = torch.cat([batch.answer.flatten() for batch in epoch])
        assert sorted(wanted[wanted != PAD].tolist()) == stream
        for before, after in itertools.pairwise(epoch):
            assert torch.equal(before.answer[:, -1], after.target[:, 0])
        for batch in epoch:
            same = (batch.answer[:, :-1] == batch.target[:, 1:]) | (batch.answer[:, :-1] == PAD)
            assert same.all()
    widths = {batch.target.shape for batch in found}
    assert {row for row, _ in widths} == {rows}
    assert max(width for _, width in widths) <= min(8, 1 + min(width for _, width in widths))
    assert tokens != 240 or widths == {(6, 8)}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_windows_are_a_pure_function_of_the_update(accumulate):
    stream, config = list(range(4, 200)), TrainConfig(batch_tokens=30, accumulate=accumulate, seed=5)
    first = list(itertools.islice(read_windows(stream, 7, config, 0), 12))
    again = list(itertools.islice(read_windows(stream, 7, config, 9), 3))
    for one, other in zip(first[9:], again, strict=True):
        assert len(one) == accumulate
        assert all(torch.equal(a.target, b.target) for a, b in zip(one, other, strict=True))


def test_every_epoch_cuts_its_windows_elsewhere():
    stream, config = list(range(1000, 1240)), TrainConfig(batch_tokens=48)
    updates = itertools.islice(read_windows(stream, 8, config, 0), 20 * plan_windows(240, 8, 48)[1])
    firsts = [batch.target[0, 0].item() for (batch,) in updates][:: plan_windows(240, 8, 48)[1]]
    assert len(set(firsts)) > 10


def test_nobody_is_to_write_the_beginning_of_a_document():
    stream = [BOS, 7, 8, EOS, BOS, 9, EOS] * 6
    for (batch,) in itertools.islice(read_windows(stream, 5, TrainConfig(batch_tokens=10), 0), 9):
        assert BOS not in batch.answer
        assert not batch.answer[batch.target == EOS].any()  # what follows is <bos>: there stands PAD, which is 0


def test_documents_are_joined_with_their_ends():
    rows = [Row([], [7, 8]), Row([], [9])]
    plain, begun = (make_task(read(add_bos=add), Vocabularies(WORDS, WORDS)) for add in (False, True))
    assert plain.join(rows) == [7, 8, 3, 9, 3]
    assert begun.join(rows) == [2, 7, 8, 3, 2, 9, 3]


def task_of(vocabulary=WORDS, **changes):
    return make_task(read(**changes), Vocabularies(vocabulary, vocabulary))


def test_what_has_no_bias_learns_none():
    without, with_it = (
        [name for name, part in build(read(bias=bias), WORDS).named_parameters() if part.requires_grad]
        for bias in (False, True)
    )
    assert not [name for name in without if name.endswith("bias") and "norm" not in name]
    assert "output.bias" in with_it


def test_a_prefix_goes_on_where_the_prompt_ends():
    """Alone, a first word would begin with a space."""
    subwords = Vocabulary.learn(["ab cd"], Tokenization(kind="bpe", size=300))
    task = task_of(subwords)
    (prompt,) = task.encode(["ab"])
    assert [*prompt.ids[1:], *task.prefix_ids(prompt, "cd")] == subwords.encode("abcd").ids
    assert [*prompt.ids[1:], *task.prefix_ids(prompt, " cd")] == subwords.encode("ab cd").ids


def test_a_context_is_full_with_its_beginning():
    for add_bos, fits in ((True, CONTEXT - 2), (False, CONTEXT - 1)):
        task = task_of(add_bos=add_bos)
        assert not task.fills_context("a" * fits)
        assert task.fills_context("a" * (fits + 1))


@pytest.mark.parametrize("add_bos", [False, True])
def test_every_token_is_scored_once_and_the_beginning_of_a_document_never(add_bos):
    """Windows of the context follow one another; a text that was cut out of a longer one does not end."""
    task = task_of(add_bos=add_bos)
    texts = ["abcdefgabcdefgabcdefg", "gfedcba"]
    wanted = [
        int(token)
        for batch, _ in task.scoring_batches([Example("", text, "x:1") for text in texts])
        for token in batch.answer[batch.answer != PAD]
    ]
    stream = [token for text in texts for token in (*WORDS.encode(text).ids, EOS)]
    assert wanted == (stream if add_bos else stream[1:-1])


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    tiny_language(folder, "train.steps=30")
    return folder / "run"


def test_a_run_continues_and_streams_the_same(run):
    predictor = regard.load(run, device="cpu")
    settings = predictor.config.decode.model_copy(update={"max_extra": 9})
    ((answer,),) = predictor.predict(["가나 "], settings=settings)
    pieces = list(predictor.stream("가나 ", settings))
    assert "".join(pieces) == answer.text
    assert not any("�" in piece for piece in pieces[:-1])


def test_scores_are_those_of_the_text(run):
    predictor = regard.load(run, device="cpu")
    examples = read_examples(predictor.config).valid
    found = regard.evaluate(predictor, examples, predictor.config.evaluate).metrics
    ids = predictor.source.encode(examples[0].target).ids
    width, total = predictor.config.text.max_length, 0.0
    for start in range(0, len(ids) - 1, width):
        part = ids[start : start + width + 1]
        with torch.inference_mode():
            rows = uncached(predictor.model, part[:-1])
        total -= sum(float(row[token]) for row, token in zip(rows, part[1:], strict=True))
    assert found["nats"] == pytest.approx(total / (len(ids) - 1), rel=1e-4)
    assert found["bpb"] == pytest.approx(total / 0.6931471805599453 / len(examples[0].target.encode()), rel=1e-4)


def test_a_prompt_that_is_too_long_is_refused_or_its_end_kept(run):
    predictor, long = regard.load(run, device="cpu"), "가나다 " * 50
    with pytest.raises(InputError, match=r"has 200 tokens, this model takes at most 24"):
        predictor(long)
    cut = regard.load(run, ["text.longer=cut"], device="cpu")
    assert cut.encode([long])[0].ids == predictor.source.encode(long).ids[-12:]  # the other half is for the answer
    with pytest.raises(InputError, match="words are aligned between a text and its translation"):
        regard.look(predictor, "가나").align_words()
    with pytest.raises(InputError, match="positions are learned: it cannot go on past its context of 24 tokens"):
        predictor.predict(["가"], settings=predictor.config.decode.model_copy(update={"slide": True}))
    assert len(predictor.predict(["가"])[0][0].tokens) - 1 <= 23


def test_a_prompt_that_just_fits_with_its_beginning(tmp_path):
    predictor = regard.load(tiny_language(tmp_path, "model.add_bos=true"), device="cpu")
    fits = "가나다라 마바사아 자차카타 파하\n가나다라 "  # 23 characters and <bos>
    assert len(predictor.encode([fits])[0].ids) == 24
    predictor.predict([fits])
    with pytest.raises(InputError, match="has 25 tokens, this model takes at most 24"):
        predictor.predict([f"{fits}마"])


def test_metrics_that_a_language_model_does_not_have(run):
    predictor = regard.load(run, ['evaluate.metrics=["bleu"]'], device="cpu")
    with pytest.raises(
        DataError, match=r"a model of kind language model has no bleu: set evaluate\.metrics to some of nats"
    ):
        regard.evaluate(predictor, read_examples(predictor.config).valid, predictor.config.evaluate)


def test_documents_of_json_lines_and_shares(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(10)), encoding="utf-8")
    data = DocumentData(kind="text", train=(str(path),), valid_share=0.25, test_share=0.1)
    splits = read_examples(read().model_copy(update={"data": data}))
    whole = "".join(e.target for e in (*splits.train, *splits.valid, *splits.test))
    assert whole == "".join(f"document {n}" for n in range(10))
    assert sum(len(e.target) for e in splits.test) == 10
    assert sum(len(e.target) for e in splits.valid) == 25
    path.write_text('{"txt": "a"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"d\.jsonl:1 has no text in field 'text'\. Its fields are txt\."):
        read_examples(read().model_copy(update={"data": data}))


def test_a_state_says_what_the_first_step_reads():
    assert State(None, None).first is None


@pytest.mark.parametrize("beam", [1, 3])
def test_maps_of_prompts_are_those_of_the_whole_text(run, beam):
    """Prompts of several lengths in one batch, each with the map of its own text, as it has alone."""
    predictor = regard.load(run, device="cpu")
    settings = predictor.config.decode.model_copy(update={"sample": False, "beam_size": beam, "max_extra": 4})
    prompts = ["가나다라 마", "가", "자차카"]
    with regard.record(predictor.model) as maps:
        answers = predictor.predict(prompts, settings=settings)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        ids, written = predictor.encode([prompt])[0].ids, [token.id for token in answer.tokens[:-1]]
        whole = torch.tensor([[*ids, *written]])
        with torch.inference_mode(), regard.record(predictor.model) as plain:
            predictor.model.decoder(predictor.model.source_embedding(whole))
        for name, weights in maps.of(ids, written).items():
            assert_close(weights, plain[name][0], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="nothing was decoded from this source"):
        maps.of([5, 5, 5], [])
    for wrong in ([*written, EOS], [BOS, *written]):
        with pytest.raises(InputError, match=r"not decoded from this source .* without <bos> and <eos>"):
            maps.of(ids, wrong)


def test_a_continuation_keeps_the_space_it_begins_with():
    vocabulary = Vocabulary.learn(["the quick brown fox"] * 9, Tokenization(kind="bpe", size=300))
    config = Config(
        data=DocumentData(kind="text", train=("x",)),
        model=LanguageModelConfig(kind="language model", layers=1, size=8, heads=1, feedforward=8),
        text=TextConfig(source=Tokenization(kind="bpe", size=300)),
    )
    task = make_task(config, Vocabularies(vocabulary, vocabulary))
    (prompt,), whole = task.encode(["the"]), vocabulary.encode("the quick").ids
    known = vocabulary.encode("the").ids
    assert whole[: len(known)] == known
    assert task.make_answer(prompt, Hypothesis(whole[len(known) :], 0.0, None)).text == " quick"
