"""What every task says of itself: its table, its form, its export; and what one that says nothing does."""

import json

import pytest
import torch
from every_task import KINDS, LETTERS, PAIRS, a_source, an_answer, made
from oracles import entries

from regard.config.run import MODELS, Config, DecodeConfig
from regard.config.text import TextConfig, Tokenization
from regard.data.batching import Row, collate, pad_sources
from regard.data.examples import Dropped, Example, Image, Ledger, Question
from regard.data.images.pixels import make_png
from regard.data.images.shapes import draw_scene
from regard.data.vocabulary import BOS, EOS, UNK, Vocabularies
from regard.errors import ConfigError, InputError
from regard.explain.recorder import watch
from regard.nn.attention import Attention
from regard.tasks import TASKS, find_task
from regard.tasks.task import Answer, Architecture, Task

every_kind = pytest.mark.parametrize("kind", KINDS)


# --- the table -------------------------------------------------------------------------------------------------------


def test_every_kind_of_model_has_a_task_that_serves_it():
    assert set(TASKS) == set(MODELS) == {model["kind"] for _, model in KINDS.values()}
    for kind, task in TASKS.items():
        assert MODELS[kind] in task.kinds
        assert task.verb


@every_kind
def test_a_task_is_found_by_the_kind_of_its_model(kind):
    task, _ = made(kind)
    assert type(task) is find_task(task.config) is TASKS[task.config.model.kind]
    assert (task.source, task.target) == tuple(task.vocabularies)


# --- forms -----------------------------------------------------------------------------------------------------------


@every_kind
def test_a_form_is_json(kind):
    form = made(kind)[0].form
    tree = form._asdict()
    assert json.loads(json.dumps(tree)) == tree
    assert set(tree) == set(form._fields)
    assert all({"name", "label"} <= set(one) <= {"name", "label", "rows", "kind"} for one in tree["fields"])
    assert all(set(one) == {"axis", "title"} for one in tree["lines"])
    assert all(set(one) == {"rows", "columns", "title", "layered"} for one in tree["groups"])


@every_kind
def test_a_form_speaks_english_and_korean(kind):
    form = made(kind)[0].form
    named = [form.submit, form.empty, *(one["label"] for one in form.fields)]
    for words in (*named, *(one["title"] for one in (*form.lines, *form.groups))):
        assert list(words) == ["en", "ko"]
        assert all(words.values())


@every_kind
def test_groups_name_every_pair_of_rows_and_columns_that_attentions_have(kind):
    task, model = made(kind)
    pairs = [(group["rows"], group["columns"]) for group in task.form.groups]
    assert len(set(pairs)) == len(pairs)
    found = {module.axes for module in model.modules() if isinstance(module, Attention)}
    assert found <= set(pairs)
    if kind in ("transformer", "pointer-generator", "language model", "encoder", "classifier", "reader of spans"):
        assert found == set(pairs)  # nothing is announced that is never there


@every_kind
def test_maps_are_as_large_as_the_axes_that_attentions_name(kind):
    """One pass over an answer, as a look makes it: the rows and columns of every map are tokens."""
    task, model = made(kind)
    (source,) = task.encode([a_source(task)])
    answer, sizes, rows = an_answer(task), {}, {}

    def seen(name, attention, queries, kv, mask):
        rows[name] = rows.get(name, 0) + queries.shape[-2] if attention.kind != "self" else queries.shape[-2]
        sizes[name] = (attention.axes, rows[name], kv.keys.shape[-2])

    with torch.inference_mode(), watch(model, seen):
        task.run(model, task.replay(source, answer))
    tokens = task.axes(source, answer)
    assert set(tokens) == {"key", "query", "input"}
    assert {line["axis"] for line in task.form.lines} <= {axis for axis, pieces in tokens.items() if pieces}
    assert bool(sizes) == (kind not in ("rnn without attention", "tagger over features", "captioner without attention"))
    for name, (axes, queries, keys) in sizes.items():
        assert (queries, keys) == (len(tokens[axes.rows]), len(tokens[axes.columns])), name


@every_kind
def test_fields_of_a_form_make_a_source(kind):
    task, _ = made(kind)
    source = a_source(task)
    assert isinstance(source, Question) == (task.config.model.kind == "reader")
    task.check_source(source, "text 1")
    image = isinstance(source, Image)
    assert image or task.parse(str(source)) == source
    does = "model reads images" if image else f"model's task is to {task.verb}"
    with pytest.raises(InputError, match=f"nonsense came, but this {does}: send "):
        task.make_source({"nonsense": "a"})


@every_kind
def test_settings_of_a_form_are_known(kind):
    form = made(kind)[0].form
    assert set(form.settings) <= {*DecodeConfig.model_fields, "best", "max_tokens"}
    assert form.best >= 1
    assert not form.settings or form.answer == "line"  # only what is written is decoded


# --- export ----------------------------------------------------------------------------------------------------------

KNOWN = {
    "transformer": Architecture(encoder=True, decoder=True),
    "transformer with segments": Architecture(encoder=True, decoder=True),  # what cannot be exported is said there
    "transformer with trees": Architecture(encoder=True, decoder=True),
    "language model": Architecture(encoder=False, decoder=True),
    "encoder": Architecture(encoder=True, decoder=False),
}
REFUSED = {
    "rnn": "it is recurrent",
    "rnn without attention": "it is recurrent",
    "rnn with segments": "it is recurrent",
    "rnn with trees": "it is recurrent",
    "pointer-generator": "it copies from the source",
    "classifier": "it is a classifier",
    "classifier with matchings": "it is a classifier",
    "ensemble": "it is a classifier",
    "classifier by the mean": "it is a classifier",
    "reader of spans": "it is a reader",
    "reader of words": "it is a reader",
    "reader of sentences": "it is a reader",
    "tagger": "its task is to tag",
    "tagger over features": "its task is to tag",
    "tagger over sub-words": "its task is to tag",
    "lineup": "its task is to line up",
    "captioner": "its task is to caption",
    "captioner without attention": "its task is to caption",
    "captioner with a transformer": "its task is to caption",
    "captioner with self-attention": "its task is to caption",
    "image classifier": "its task is to classify images",
}


@every_kind
def test_only_what_others_know_is_exported(kind):
    task, _ = made(kind)
    if kind in KNOWN:
        assert task.architecture() == KNOWN[kind]
    else:
        with pytest.raises(ConfigError, match=REFUSED[kind]):
            task.architecture()


# --- a task that says nothing ----------------------------------------------------------------------------------------


class SilentTask(Task):
    """Everything is as by default."""

    verb = "say nothing"


@pytest.fixture
def silent():
    return SilentTask(Config(data=PAIRS, model=KINDS["transformer"][1]), Vocabularies(LETTERS, LETTERS))


def test_export_is_refused_unless_a_task_says_what_it_is(silent):
    with pytest.raises(ConfigError, match="its task is to say nothing, which is not offered for export"):
        silent.architecture()


def test_what_a_task_does_not_do_is_refused_in_words(silent):
    (source,) = silent.encode(["abc"])
    for call, message in (
        (lambda: silent.prefix_ids(source, "a"), "this model does not write its answers"),
        (lambda: silent.continuation(source), "this model does not write: there is nothing to stream"),
        (lambda: silent.output_limit(3, DecodeConfig()), "this model does not write"),
        (lambda: silent.states(None, torch.tensor([[4]]), torch.tensor([1])), "this model has no vectors"),
        (
            lambda: silent.make_source({"question": "a"}),
            "question came, but this model's task is to say nothing: send",
        ),
        (lambda: silent.check_source(Question("a", "b"), "text 3"), "text 3 is Question, expected str"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(ConfigError, match="a model of kind transformer cannot begin with another run"):
        silent.adopt(silent.config, silent.config)


def test_a_task_reads_one_text_and_chooses(silent):
    (source,) = silent.encode(["abc"])
    assert source.ids == [*LETTERS.encode("abc").ids, EOS]
    assert silent.parse("a\tb") == silent.make_source({"text": "a\tb"}) == "a\tb"
    assert silent.make_row([4], [5]) == Row([4], [5], sequence=False)
    assert silent.axes(source, Answer("", 0.0)) == {
        "key": [("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("<eos>", 3, 3)],
        "query": [],
        "input": [],
    }
    assert silent.separator is None
    assert silent.canonical(["b", "a"]) == ["b", "a"]
    assert silent.calibrate(None, list) == {}
    assert silent.pretrained_run(silent.config) is None
    assert silent.length_bounds([4], Answer("", 0.0), DecodeConfig()) is None
    assert silent.accept(Example("a", " ", "x:1"), silent.config) == Dropped("empty", "x:1")
    assert silent.accept(Example("a", "\ud800", "x:2"), silent.config) == Dropped("not valid Unicode", "x:2")


def test_a_vocabulary_knows_what_its_side_holds(silent):
    """One for both sides knows both; of two, only that of the source knows the raw text."""
    examples, raw = [Example("ab", "cd", "x:1")], ["ef"]
    letters = TextConfig(source=Tokenization(kind="char"))
    for text, known in (
        (letters, ("abcdef", "abcdef")),
        (letters.model_copy(update={"target": Tokenization(kind="char")}), ("abef", "cd")),
    ):
        both = silent.learn_vocabularies(silent.config.model_copy(update={"text": text}), examples, raw)
        assert both.shared == (text.target is None)
        for vocabulary, wanted in zip(both, known, strict=True):
            assert "".join(letter for letter in "abcdefg" if vocabulary.find(letter) is not None) == wanted


def test_an_unknown_word_stands_under_a_map_as_it_was_written(silent):
    (source,) = silent.encode(["a?b"])
    assert source.ids[1] == UNK
    assert [piece.text for piece in silent.axes(source, Answer("", 0.0))["key"]] == ["a", "?", "b", "<eos>"]


def test_an_example_needs_both_sides(silent):
    assert silent.accept(Example(" ", "a", "x:1"), silent.config) == Dropped("empty", "x:1")
    assert silent.accept(Example("a", "", "x:1"), silent.config) == Dropped("empty", "x:1")
    assert silent.accept(Example("a", "b", "x:1"), silent.config) == Example("a", "b", "x:1")


@pytest.mark.parametrize("kind", ["rnn", "transformer", "pointer-generator", "language model"])
def test_the_score_of_an_output_is_what_each_step_gives_its_token(kind):
    """Of outputs of several lengths together, the empty one among them, to sources of several lengths."""
    task, model = made(kind)
    sources, outputs = task.encode(["abc", "d", "ab"]), [[5, 7], [], [4, 4, 6, 5]]
    with torch.inference_mode():
        found = task.score(model, sources, outputs)
        for source, output, logprobs in zip(sources, outputs, found, strict=True):
            state = model.start(*pad_sources([source.ids]))
            last, wanted = [BOS] if state.first is None else state.first, []
            for token in (*output, EOS):
                every, state = model.step(torch.tensor([int(last[0])]), state)
                wanted.append(float(every[0, token]))
                last = [token]
            assert logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(("reader", "tagger", "lineup"))])
def test_the_states_of_a_text_do_not_depend_on_the_ones_beside_it(kind):
    task, model = made(kind)
    asked = ["abc", "d", "abcdefg"]
    if isinstance(a_source(task), Image):
        asked = [Image("", data=make_png(draw_scene(seed, 24).pixels)) for seed in range(3)]
    sources = [one.ids for one in task.encode(asked)]
    with torch.inference_mode():
        states, lengths = task.states(model, *pad_sources(sources))
        assert lengths.tolist() == [len(ids) for ids in sources]
        for row, ids in enumerate(sources):
            alone, _ = task.states(model, *pad_sources([ids]))
            torch.testing.assert_close(states[row, : len(ids)], alone[0], rtol=0, atol=1e-5)


def test_an_output_has_at_most_twice_the_tokens_of_a_text_and_a_continuation_what_is_left():
    assert made("transformer")[0].output_limit(7, DecodeConfig()) == 2 * 30
    assert made("language model")[0].output_limit(7, DecodeConfig()) == 30 - 7


def test_what_is_suspiciously_short_or_long_follows_the_vocabularies():
    one, _ = made("transformer")
    two = type(one)(one.config, Vocabularies(LETTERS, entries(9)))
    settings, nothing = DecodeConfig(max_ratio=2.0, max_extra=5), Answer("", 0.0)
    assert one.length_bounds([4] * 9, nothing, settings) == (1 / 3, 2 * 10 + 5)
    assert two.length_bounds([4] * 9, nothing, settings) == (1 / 20, 2 * 10 + 5)
    assert one.length_bounds([4] * 30, nothing, settings).most == 2 * 30  # it cannot be longer


def test_examples_that_are_scored_keep_their_numbers(silent):
    """However they are batched, and whichever cannot be given as a target at all."""

    class Picky(SilentTask):
        def encode_targets(self, examples, sources):
            found = super().encode_targets(examples, sources)
            refused = Dropped("refused", "x:1")
            return [refused if one.target == "c" else ids for one, ids in zip(examples, found, strict=True)]

    task = Picky(silent.config, silent.vocabularies)
    examples = [Example("abcdefgh"[:n], target, "x:1") for n, target in ((3, "a"), (1, "c"), (8, "b"), (2, "a"))]
    numbers = {}
    for batch, kept in task.scoring_batches(examples):
        for number, length, answer in zip(kept, batch.lengths.tolist(), batch.answer.tolist(), strict=True):
            numbers[number] = (length, answer)
    a, b = (LETTERS.encode(one).ids for one in "ab")
    assert numbers == {0: (4, a), 2: (9, b), 3: (3, a)}


def test_a_long_example_is_dropped_cut_or_refused(silent):
    text = silent.config.text.model_copy(update={"max_length": 3})
    task = SilentTask(silent.config.model_copy(update={"text": text}), silent.vocabularies)
    ledger, example = Ledger(read=1, kept=1), Example("abcde", "a", "x:1")
    assert task.encode_examples([example], ledger) == []
    assert (ledger.kept, ledger.dropped) == (0, {"too long": ["x:1"]})
    (row,) = task.encode_examples([example], ledger := Ledger(), "cut")
    assert row.source == [*LETTERS.encode("abc").ids, EOS]
    assert ledger.cut == 1
    assert collate([row]).lengths.tolist() == [4]
