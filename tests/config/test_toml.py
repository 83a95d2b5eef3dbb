"""Settings: what is right is read, what is wrong is named, before any tensor exists."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from settings_page import BARE, PARTS, page

from regard.config import data, model, run, text, toml, vision
from regard.config.settings import Settings
from regard.errors import ConfigError
from regard.training.prepare import check_metrics

REVERSE = '[data]\nkind = "reverse"\n[model]\nkind = "transformer"\n'
TABLE = '[data]\nkind = "tsv"\ntrain = ["a.tsv"]\n[model]\nkind = "rnn"\n'
MODELS = (
    "'rnn', 'transformer', 'language model', 'encoder', 'classifier', 'reader', 'tagger', 'lineup', 'captioner', "
    "'image classifier'"
)
PARALLEL = '[data]\nkind = "parallel"\ntrain = {source = ["a"], target = ["b"]}\n[model]\nkind = "rnn"\n'


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Reads settings given as text, from the directory that relative file names start at."""
    monkeypatch.chdir(tmp_path)

    def reading(text: str, *changes: str) -> run.Config:
        Path("given.toml").write_text(text, encoding="utf-8")
        return toml.read("given.toml", changes)

    return reading


def refusal(call, *arguments) -> str:
    """The message of the ConfigError that a call raises."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return str(caught.value)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", toml.recipes())
def test_every_recipe_is_read_and_written_again(name, tmp_path):
    recipe = toml.parse(toml.recipes()[name])
    assert recipe.about
    assert recipe.time
    (tmp_path / "written.toml").write_text(toml.dump(recipe), encoding="utf-8")
    assert toml.parse(tmp_path / "written.toml") == recipe
    check_metrics(recipe)


def test_recipe_is_found_by_its_name():
    assert toml.read("numbers").data == toml.parse(toml.recipes()["numbers"]).data


@pytest.mark.parametrize("text", [REVERSE, TABLE, PARALLEL])
def test_written_settings_parse_to_the_same(read, text):
    changes = ['text.target.kind="char"', "train.patience=3", "decode.seed=5", 'about="ein \\"Hund\\"\\n한국어"']
    given = read(text, *changes)
    assert read(toml.dump(given)) == given


@pytest.mark.parametrize("text", [REVERSE, TABLE, PARALLEL])
def test_written_settings_hold_every_default(read, text):
    """A run keeps what it was trained with, whatever later versions begin with."""
    given = read(text)
    written = tomllib.loads(toml.dump(given))
    for name, group in given:
        if isinstance(group, Settings):
            assert written[name].keys() == {field for field, value in group if value is not None}


def test_written_settings_keep_infinity(read):
    given = read(REVERSE, "train.clip_norm=inf")
    assert read(toml.dump(given)).train.clip_norm == float("inf")


def test_settings_are_frozen(read):
    given = read(REVERSE)
    for group in (given, given.data, given.text.source, given.model, given.train):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(group, next(iter(type(group).model_fields)), "other")


def test_changed_settings_leave_the_given_ones(read):
    given = read(REVERSE)
    assert toml.change(given, ["train.steps=7"]).train.steps == 7
    assert given.train.steps is None
    assert refusal(toml.change, given, ["train.step=7"]) == (
        "--set: unknown setting train.step. Did you mean train.steps?"
    )


# --- wrong settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (REVERSE, "modle.size=3", "unknown setting modle. Did you mean model?"),
        (REVERSE, "train.step=3", "unknown setting train.step. Did you mean train.steps?"),
        (REVERSE, "train.zzz=3", "unknown setting train.zzz."),
        (REVERSE, "text.sorce.kind=bpe", "unknown setting text.sorce. Did you mean text.source?"),
        (REVERSE, "text.source.sise=3", "unknown setting text.source.sise. Did you mean text.source.size?"),
        (REVERSE, "text.target.sise=3", "unknown setting text.target.sise. Did you mean text.target.size?"),
        (REVERSE, "data.longst=3", "unknown setting data.longst. Did you mean data.longest?"),
        (REVERSE, "data.langage=de", "unknown setting data.langage."),  # a setting of another kind of data
        (REVERSE, "model.head=3", "unknown setting model.head. Did you mean model.heads?"),
        (REVERSE, "model.cel=gru", "unknown setting model.cel."),  # a setting of another kind of model
        (TABLE, "data.cut_vald=3", "unknown setting data.cut_vald. Did you mean data.cut_valid?"),
        (PARALLEL, "data.train.sorce=[]", "unknown setting data.train.sorce. Did you mean data.train.source?"),
        (REVERSE, "train.steps=abc", "setting train.steps is 'abc': input should be a valid integer."),
        (REVERSE, "train.steps=1.5", "setting train.steps is 1.5: input should be a valid integer."),
        (REVERSE, "train.seed=true", "setting train.seed is True: input should be a valid integer."),
        (REVERSE, "train.steps=0", "setting train.steps is 0: input should be greater than or equal to 1."),
        (REVERSE, "train.learning_rate=nan", "setting train.learning_rate is nan: input should be greater than 0."),
        (REVERSE, "model.dropout=1", "setting model.dropout is 1: input should be less than 1."),
        (REVERSE, "data.letters=27", "setting data.letters is 27: input should be less than or equal to 26."),
        (REVERSE, "about=12", "setting about is 12: input should be a valid string."),
        (REVERSE, "text.source.jamo=yes", "setting text.source.jamo is 'yes': input should be a valid boolean."),
        (REVERSE, "text.longer=no", "setting text.longer is 'no': input should be 'drop', 'cut' or 'error'."),
        (REVERSE, "train.betas=[0.9,'x']", "setting train.betas.1 is 'x': input should be a valid number."),
        (PARALLEL, "data.train.source=1", 'setting data.train.source is 1: input should be a list, as ["a", "b"].'),
        (REVERSE, "decode.top_k=3", "decode: top_k would do nothing without sampling: set decode.sample = true too."),
        (REVERSE, "model.kind=cnn", f"model.kind is 'cnn', expected one of {MODELS}."),
        (REVERSE, "model.heads=7", "model: size 512 is not a multiple of heads 7."),
        (
            '[data]\nkind = "text"\ntrain = ["a"]\n[model]\nkind = "language model"',
            "data.cut_valid=10",
            "data: a text has no sources to cut: use valid_share and test_share, as valid_share = 0.1.",
        ),
        (
            '[data]\nkind = "labelled"\ntrain = ["a"]\n[text.target]\nkind = "label"\n[model]\nkind = "classifier"',
            "model.multi_label=true",
            'model.multi_label needs what stands between two labels: text.target.separator = ",".',
        ),
        (
            '[data]\nkind = "babi"\ntrain = ["a"]\n[text.target]\nkind = "label"\n[model]\nkind = "reader"\n'
            'answer = "word"',
            "text.target.separator=+",
            "text.target.separator is for classifiers of several labels: set model.multi_label = true.",
        ),
        (REVERSE, "decode.temperature=inf", "setting decode.temperature is inf: input should be a finite number."),
    ],
)
def test_wrong_setting_is_named(read, text, change, message):
    assert refusal(read, text, change) == f"given.toml with --set: {message}"


def test_wrong_kind_lists_the_choices(read):
    files = "'parallel', 'tsv', 'csv', 'jsonl', 'labelled', 'babi', 'squad', 'columns', 'conllu', 'text', 'captions'"
    choices = f"{files}, 'reverse', 'numbers', 'dates', 'transduce', 'lineup', 'listops', 'shapes', 'digits'"
    assert (
        refusal(read, REVERSE, "data.kind=xml")
        == f"given.toml with --set: data.kind is 'xml', expected one of {choices}."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[data]\nkind = "reverse"', "setting model is missing."),
        ('[model]\nkind = "rnn"\n[data]\nkind = "tsv"', "setting data.train is missing."),
        (
            '[model]\nkind = "rnn"\n[data]\nkind = "parallel"\ntrain = {source = []}',
            "setting data.train.target is missing.",
        ),
    ],
)
def test_missing_setting_is_named(read, text, message):
    assert refusal(read, text) == f"given.toml: {message}"


def test_missing_kind_is_named(read):
    message = refusal(read, "[data]\nexamples = 3\n[model]\nsize = 8")
    assert message.startswith("given.toml: setting data.kind is missing.")
    assert "\nsetting model.kind is missing." in message


def test_missing_kind_lists_the_choices(read):
    message = refusal(read, '[data]\nkind = "reverse"\n[model]\nsize = 8')
    assert message == f"given.toml: setting model.kind is missing. Choose one of {MODELS}."


def test_wrong_column_is_named(read):
    assert "data.source.str" not in refusal(read, TABLE, "data.source=1.5")


def test_every_complaint_is_made(read):
    message = refusal(read, REVERSE, "train.steps=0", "decode.beam_size=x", "typo=1")
    assert message.splitlines() == [
        "given.toml with --set: setting train.steps is 0: input should be greater than or equal to 1.",
        "setting decode.beam_size is 'x': input should be a valid integer.",
        "unknown setting typo.",
    ]


def test_heads_divide_the_size_and_key_heads_the_heads(read):
    sizes = ["model.size=24", "model.heads=6"]
    assert read(REVERSE, *sizes, "model.kv_heads=3").model.kv_heads == 3
    for change, message in (("kv_heads=4", "heads 6 is not a multiple of kv_heads 4"), ("heads=7", "size 24 is not a")):
        assert message in refusal(read, REVERSE, *sizes, f"model.{change}")


def test_an_odd_size_is_for_one_direction(read):
    assert read(TABLE, "model.size=7", "model.bidirectional=false").model.size == 7
    assert "size 7 is odd" in refusal(read, TABLE, "model.size=7")


@pytest.mark.parametrize("buckets", ["[5, 5]", "[5, 10, 7]"])
def test_buckets_increase(read, buckets):
    assert f"buckets {buckets} must increase" in refusal(read, REVERSE, f"evaluate.buckets={buckets}")


def test_rotary_positions_need_even_heads(read):
    message = refusal(read, REVERSE, "model.size=24", "model.positions=rotary")
    assert message == "given.toml with --set: model: rotary positions rotate pairs: size / heads = 3 must be even."


# --- another kind ----------------------------------------------------------------------------------------------------

README = Path(__file__).parents[2] / "README.md"


def test_another_kind_keeps_what_fits_and_says_what_it_drops():
    said = []
    found = toml.read("reverse", ["model.kind=transformer"], said.append)
    assert (found.model.kind, found.model.size) == ("transformer", 128)
    assert said == ["model.kind 'transformer' has no embedding, attention: left out, they belong to another kind."]
    found = toml.read("numbers", ["data.kind=dates"], said.append)
    assert found.data.kind == "dates"
    assert said[1:] == ["data.kind 'dates' has no language, digits: left out, they belong to another kind."]


def test_the_readmes_file_takes_every_kind_it_names(read):
    text = README.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    with pytest.warns(UserWarning, match="has no feedforward, heads, encoder_layers, decoder_layers, positions: left"):
        found = read(text.replace('kind = "transformer"', 'kind = "rnn"'))
    assert (found.model.kind, found.model.size) == ("rnn", 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["model.kind=transformer", "model.bidirectional=true"],
            "unknown setting model.bidirectional.",
        ),
        (
            ['model={kind="transformer", attention="dot"}'],
            "setting model.attention is 'dot': input should be 'full', 'window', 'bigbird' or 'linformer'.",
        ),
        (["model.atention=dot"], "unknown setting model.atention. Did you mean model.attention?"),
    ],
)
def test_what_is_asked_for_and_does_not_fit_is_refused(read, changes, message):
    assert refusal(read, TABLE, *changes) == f"given.toml with --set: {message}"


# --- how long to train -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "batches", "steps", "warmup", "every"),
    [
        ({}, 14, 1400, 140, 70),
        ({"epochs": 3}, 7, 21, 2, 2),
        ({"epochs": 3, "accumulate": 4}, 7, 6, 0, 1),
        ({}, 1000, 100_000, 400, 1000),
        ({"steps": 500, "warmup": 0, "validate_every": 250}, 14, 500, 0, 250),
        ({"steps": 500, "epochs": 3}, 14, 500, 50, 25),
    ],
)
def test_the_length_of_training_follows_the_data(given, batches, steps, warmup, every):
    found = run.TrainConfig(**given).resolve(batches)
    assert (found.steps, found.warmup, found.validate_every) == (steps, warmup, every)
    assert found.resolve(2 * batches) == found
    assert found.patience == 10


@pytest.mark.parametrize("name", toml.recipes())
def test_recipes_say_how_long_they_train(name):
    """Published figures are theirs, whatever the defaults become."""
    train = toml.parse(toml.recipes()[name]).train
    assert train.patience == 0
    assert train.resolve(7) == train


def test_epochs_take_the_place_of_a_recipes_steps():
    assert toml.read("reverse", ["train.epochs=3"]).train.resolve(7).steps == 21
    assert toml.read("reverse", ["train.epochs=3", "train.steps=5"]).train.resolve(7).steps == 5


# --- --set -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("a.b=3", 3),
        ("a.b=1e-3", 0.001),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ('a.b=["x", "y"]', ["x", "y"]),
        ('a.b="3"', "3"),
        ("a.b=inverse sqrt", "inverse sqrt"),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        (" a.b =3", 3),
        ("a.b=" + "[" * 100_000, "[" * 100_000),
        ("a.b=" + "1" * 5000, "1" * 5000),
    ],
)
def test_change_is_toml_or_plain_text(change, value):
    assert toml.merge({"a": {"c": 1}}, [change]) == {"a": {"b": value, "c": 1}}


scalars = (
    st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False) | st.text("aé 한\"\\'=.", max_size=9)
)


@settings(deadline=None, max_examples=100)
@given(scalars | st.lists(st.integers(0, 9), max_size=3))
def test_change_takes_every_value(value):
    written = json.dumps(value, ensure_ascii=False).replace("Infinity", "inf")
    assert toml.merge({}, [f"a.b={written}"]) == {"a": {"b": value}}


def test_a_change_sets_one_setting_alone():
    assert toml.merge({}, ["a=1\nb = 2"]) == {"a": "1\nb = 2"}


def test_later_changes_win():
    assert toml.merge({}, ["a=1", "a=2"]) == {"a": 2}


@pytest.mark.parametrize("change", ["train.steps", "=3", " =3", ""])
def test_change_without_name_or_value_is_refused(change):
    assert refusal(toml.merge, {}, [change]) == (
        f"--set {change} is not of the form name=value, as in --set train.steps=200."
    )


def test_change_inside_a_value_is_refused():
    assert refusal(toml.merge, {"train": {"steps": 3}}, ["train.steps.x=1"]) == (
        "--set train.steps.x=1: steps is a value, not a group of settings."
    )


# --- files -----------------------------------------------------------------------------------------------------------


def test_unknown_recipe_is_answered_with_the_nearest():
    assert refusal(toml.read, "number") == "unknown recipe number. Did you mean numbers? See `regard recipes`."
    assert refusal(toml.read, "zzzz") == "unknown recipe zzzz. See `regard recipes`."


def test_missing_file_lists_the_recipes(tmp_path):
    path = tmp_path / "none.toml"
    known = ", ".join(toml.recipes())
    assert refusal(toml.read, str(path)) == f"{path} does not exist. Give a .toml file, or a recipe: {known}."


def test_directory_is_no_settings_file(tmp_path):
    assert refusal(toml.read, str(tmp_path)) == (
        f"{tmp_path} is a directory, expected a .toml file or a recipe's name."
    )


@pytest.mark.parametrize(
    "content", [b"no toml", b"a = 1\na = 2", b"\xff\xfe", b"a = " + b"[" * 100_000, b"a = " + b"1" * 5000]
)
def test_file_that_is_not_toml_is_refused(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert refusal(toml.read, str(path)).startswith(f"{path} is not TOML: ")


def test_a_byte_order_mark_is_no_setting(tmp_path):
    (tmp_path / "marked.toml").write_text(REVERSE, encoding="utf-8-sig")
    assert toml.read(str(tmp_path / "marked.toml")).data.kind == "reverse"


CLASSIFIER = TABLE.replace("rnn", "classifier") + '[text.target]\nkind = "label"\n'


@pytest.mark.parametrize(
    ("text", "name", "many"),
    [
        *((TABLE, f"data.{split}", True) for split in ("train", "valid", "test")),
        *((TABLE, f"model.{side}_vectors", False) for side in ("source", "target")),
        (TABLE, "text.raw", True),
        (CLASSIFIER, "model.pretrained", False),
    ],
)
def test_every_path_becomes_absolute_by_every_road(read, tmp_path, text, name, many):
    """In a file, by --set, and by a change of settings that were read."""
    value = '["here"]' if many else '"here"'
    for made in (read(text, f"{name}={value}"), toml.change(read(text), [f"{name}={value}"])):
        group, _, last = name.partition(".")
        found = getattr(getattr(made, group), last)
        assert found == ((str(tmp_path / "here"),) if many else str(tmp_path / "here"))


def test_paths_become_absolute(read, tmp_path, monkeypatch):
    monkeypatch.setenv("SOMEWHERE", "/some/where")
    monkeypatch.setenv("HOME", "/home/sweet")
    table = read(TABLE, 'data.train=["$SOMEWHERE/a.tsv", "~/b.tsv", "c/d.tsv"]', "model.target_vectors=v.txt")
    assert table.data.train == ("/some/where/a.tsv", "/home/sweet/b.tsv", str(tmp_path / "c/d.tsv"))
    assert table.model.target_vectors == str(tmp_path / "v.txt")
    assert table.model.source_vectors is None
    parallel = read(PARALLEL, 'data.valid.source=["${SOMEWHERE}/v"]', 'data.valid.target=["/w"]')
    assert parallel.data.train == data.Sides(source=(str(tmp_path / "a"),), target=(str(tmp_path / "b"),))
    assert parallel.data.valid == data.Sides(source=("/some/where/v",), target=("/w",))
    assert parallel.data.test is None


def test_paths_of_a_file_begin_at_its_folder(tmp_path, monkeypatch):
    """And those of --set at the current one, wherever the file is; those of the user's variables, too."""
    monkeypatch.setenv("SOMEWHERE", "here")
    (tmp_path / "there").mkdir()
    text = TABLE.replace('["a.tsv"]', '["a.tsv", "$SOMEWHERE/b", "/c"]') + 'source_vectors = "v.txt"\n'
    (tmp_path / "there" / "given.toml").write_text(f'{text}[text]\nraw = ["../r.txt"]\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = toml.read("there/given.toml", ['data.valid=["d"]', "model.target_vectors=w.txt"])
    assert found.data.train == (str(tmp_path / "there/a.tsv"), str(tmp_path / "here/b"), "/c")
    assert found.data.valid == (str(tmp_path / "d"),)
    assert found.model.source_vectors == str(tmp_path / "there/v.txt")
    assert found.model.target_vectors == str(tmp_path / "w.txt")
    assert [Path(name).resolve() for name in found.text.raw] == [tmp_path / "r.txt"]
    (tmp_path / "run.toml").write_text(toml.dump(found), encoding="utf-8")
    assert toml.read(str(tmp_path / "run.toml")) == found  # what a run keeps is true everywhere


@pytest.mark.parametrize("name", ["$REGARD_NOWHERE", "${REGARD_NOWHERE}"])
def test_missing_environment_variable_says_how_to_obtain(read, monkeypatch, name):
    monkeypatch.delenv("REGARD_NOWHERE", raising=False)
    message = f"the environment variable {name} is not set, and the data is at {name}/a."
    assert refusal(read, TABLE, f'data.train=["{name}/a"]', "data.obtain=Get it there.") == f"{message} Get it there."
    assert refusal(read, TABLE, f'data.train=["{name}/a"]') == message


def test_missing_environment_variable_of_a_recipe_says_how_to_obtain(monkeypatch):
    monkeypatch.delenv("REGARD_DATA", raising=False)
    message = refusal(toml.read, "multi30k")
    assert "the environment variable $REGARD_DATA is not set" in message
    assert toml.parse(toml.recipes()["multi30k"]).data.obtain in message


def test_the_page_of_settings_is_what_they_say():
    path = Path(__file__).parents[2] / "docs" / "settings.md"
    assert path.read_text(encoding="utf-8") == page(), "python tests/settings_page.py > docs/settings.md"
    assert "| |\n" not in page()  # every setting has words
    groups = {group for _, _, some in PARTS for group in some}
    every = [data, text, model, vision, run]
    known = {one for module in every for one in vars(module).values() if isinstance(one, type)}
    assert {one for one in known if issubclass(one, Settings)} - {*BARE, run.Config} == groups


def test_another_kind_of_data_leaves_what_had_another_form(read):
    """A generator's numbers of examples are no files; a run needs none to learn from when it is scored on others."""
    changed = toml.change(read(REVERSE, "data.valid=7"), ["data.kind=tsv", "data.test=other.tsv"])
    assert (changed.data.train, changed.data.valid, changed.data.test) == ((), (), (str(Path("other.tsv").absolute()),))
    said = []
    Path("given.toml").write_text(REVERSE.replace("[model]", "valid = 5\n[model]"))
    given = toml.read("given.toml", ["data.kind=tsv", "data.train=a.tsv", "data.cut_valid=2"], said.append)
    assert (given.data.train, given.data.valid) == ((str(Path("a.tsv").absolute()),), ())
    assert said == ["data.kind 'tsv' has no valid: left out, they belong to another kind."]
    back = toml.change(changed, ["data.kind=reverse"])
    assert back.data == data.ReverseData(kind="reverse")
