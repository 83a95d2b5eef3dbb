"""Why an answer came out so: tokens, numbers, files."""

import base64
import functools
import itertools
import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from conftest import tiny, train_tiny
from every_task import KINDS, a_source, made
from hypothesis import given
from hypothesis import strategies as st
from long_runs import long_predictor
from oracles import hardmax, shaken
from rich.cells import cell_len
from torch.testing import assert_close

import regard
from regard.attention.scores import biased, scaled_dot
from regard.config.model import TransformerConfig
from regard.config.run import Config
from regard.data.encoding import Encoded
from regard.data.vocabulary import Vocabulary
from regard.errors import InputError
from regard.evaluation.fit import fit
from regard.explain.alignment import agree
from regard.explain.attention_maps import Map, make_page, name_function
from regard.explain.look import Look, look
from regard.explain.plots import FONTS, draw_arcs, draw_map, find_fonts, place_arcs, save_map, split_letters, wrap_title
from regard.inference.predictor import Predictor
from regard.nn.attention import CROSS, Additive, Attention
from regard.tasks import make_task
from regard.tasks.axes import Piece, written_pieces
from regard.tasks.task import Answer
from regard.training.prepare import start_run

SCHEMA = json.loads((Path(__file__).parent.parent.parent / "docs" / "maps.schema.json").read_text(encoding="utf-8"))


def transformer_run(folder, *changes):
    """A small Transformer over letters."""
    sizes = {"size": 12, "heads": 3, "feedforward": 8, "encoder_layers": 2, "decoder_layers": 2}
    config = tiny().model_copy(update={"model": TransformerConfig(kind="transformer", **sizes, **dict(changes))})
    fit(start_run(config, folder), folder, lambda event: None, device="cpu")
    return regard.load(folder, device="cpu")


@pytest.fixture(scope="module", params=["rnn", "sinusoidal", "alibi", "rotary"])
def predictor(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("look") / "run"
    if request.param == "rnn":
        train_tiny(folder)
        return regard.load(folder, device="cpu")
    return transformer_run(folder, ("positions", request.param))


def look_at(kind, **options):
    """A look at something that a task of this kind can be asked."""
    predictor = Predictor(*made(kind))
    return look(predictor, a_source(predictor.task), **options)


def test_every_axis_is_as_long_as_its_tokens(predictor):
    found = look(predictor, "abcd", best=2)
    assert len(found.answers) == 2
    for one in found.maps:
        rows, columns = found.tokens[one.rows], found.tokens[one.columns]
        assert tuple(one.weights.shape[1:]) == (len(rows), len(columns))
        assert len(one.entropy()) == len(one.weights)
    assert [piece.text for piece in found.tokens["key"]] == ["a", "b", "c", "d", "<eos>"]
    assert "".join(piece.text for piece in found.tokens["query"][:-1]) == found.answer.text
    assert found.tokens["input"][0].text == "<bos>"


def test_the_calculation_arrives_at_the_map(predictor):
    found = look(predictor, "abcd")
    for one in found.maps:
        for head in range(len(one.weights)):
            row = one.weights.shape[1] - 1
            numbers = found.calculate(row, head, one.name)
            assert_close(numbers.weights, one.weights[head, row], atol=1e-5, rtol=1e-5)
            assert_close(numbers.context, (numbers.weights[:, None] * numbers.values).sum(0), atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match=r"row 99 of head 0 was asked for; .* has \d heads \(from 0\) of \d+ rows"):
        found.calculate(99)


def test_the_calculation_is_done_with_the_attentions_own_normalizer(tmp_path):
    found = look(transformer_run(tmp_path / "run"), "abcd")
    name = "decoder.blocks.0.cross_attention"
    attention = found.predictor.model.get_submodule(name)
    soft = found.map(name)
    attention.normalize = hardmax
    hard = look(found.predictor, "abcd", target=found.answer.text).map(name)
    assert hard.weights.unique().tolist() == [0, 1]
    assert torch.equal(hard.weights.argmax(-1), soft.weights.argmax(-1))
    assert hard.entropy() == [0, 0, 0]
    given = found.tree(vectors=[name])["maps"][list(found.heads).index(name)]["vectors"]
    assert (given["score"], given["normalizer"]) == ("scaled dot", "hardmax")
    for head, row in itertools.product(range(3), range(hard.weights.shape[1])):
        numbers = found.calculate(row, head, name)
        assert torch.equal(numbers.weights, hard.weights[head, row])
        assert torch.equal(numbers.context, numbers.values[numbers.weights.argmax()])


GROUPED = {"kind": "language model", "size": 24, "heads": 6, "kv_heads": 2, "feedforward": 7, "layers": 2}


def grouped():
    """A language model whose heads share keys and values by threes."""
    task = made("language model")[0]
    task = make_task(Config(data=task.config.data, model=GROUPED, text=task.config.text), task.vocabularies)
    torch.manual_seed(1)
    return task, task.build().eval()


LINEAR = {
    name: functools.partial(long_predictor, "classifier", name, 30) for name in ("window", "bigbird", "linformer")
}


@pytest.mark.parametrize("kind", [*KINDS, "grouped", *LINEAR])
def test_calculations_give_what_the_model_went_on_with(kind):
    """Every head's context, from vectors and weights that were looked at, through the output of the attention: what
    the model's own pass, which makes no map, got from it."""
    predictor = LINEAR[kind]() if kind in LINEAR else Predictor(*(grouped() if kind == "grouped" else made(kind)))
    shaken(predictor.model)
    found, outputs = look(predictor, a_source(predictor.task)), {}
    handles = [
        module.register_forward_hook(lambda _, __, output, name=name: outputs.setdefault(name, []).append(output[0]))
        for name, module in predictor.model.named_modules()
        if isinstance(module, Attention)
    ]
    with torch.inference_mode():
        predictor.task.run(predictor.model, found.batch)
    for handle in handles:
        handle.remove()
    entries = found.tree(packed=True, vectors=list(found.heads))["maps"]
    for one, entry in zip(found.maps, entries, strict=True):
        if one.name not in found.uses:
            continue
        name, _, use = one.name.partition("#")
        went_on = outputs[name][int(use)] if use else torch.cat(outputs[name])
        heads, rows, columns = one.weights.shape
        numbers = [[found.calculate(row, head, one.name) for head in range(heads)] for row in range(rows)]
        contexts = torch.stack([torch.cat([number.context for number in row]) for row in numbers])
        output = predictor.model.get_submodule(name).output
        assert_close(output(contexts), went_on, atol=1e-4, rtol=1e-4)
        assert_close(torch.stack([torch.stack([n.weights for n in row]) for row in numbers], 1), one.weights)
        for what, count in (("queries", rows), ("keys", columns), ("values", columns)):
            packed = torch.frombuffer(bytearray(base64.b64decode(entry["vectors"][what])), dtype=torch.float32)
            packed = packed.view(heads, count, -1)
            for row, head in itertools.product(range(rows), range(heads)):
                own = numbers[row][head]
                wanted = {"queries": own.query, "keys": own.keys, "values": own.values}[what]
                assert torch.equal(packed[head, row] if what == "queries" else packed[head], wanted)


def test_widths_and_distances_by_hand():
    """Bits, not nats; and a step back is as far as a step forward."""
    even, two, one = [0.25] * 4, [0.5, 0, 0.5, 0], [0, 0, 0, 1.0]
    weights = torch.tensor([[even, two, two, one], [one, one, one, [1.0, 0, 0, 0]]])
    seen = Map.of("x", "self", 0, "key", "key", weights)
    assert seen.entropy() == pytest.approx([(2 + 1 + 1 + 0) / 4, 0])
    assert seen.distance() == pytest.approx([((0 + 1 + 2 + 3) / 4 + 1 + 1 + 0) / 4, (3 + 2 + 1 + 3) / 4])
    assert replace(seen, kind="cross").distance() is None


def test_sentences_stand_under_their_own_columns():
    """Another sentence in one place changes the key of that column and of no other: the first layer sees each alone."""
    predictor = Predictor(*made("reader of sentences"))
    sentences, other = ["ab c.", "de.", "f gh.", "a a."], "hh ee."

    def keys(sentences):
        found = look(predictor, regard.Question("bc d", " ".join(sentences)))
        name = next(iter(found.heads))
        return found, found.calculate(0, 0, name).keys

    found, before = keys(sentences)
    pieces = found.tokens["key"]
    assert [piece.text.strip() for piece in pieces] == ["bc d", *reversed(sentences)]
    assert [found.text[piece.start : piece.end] for piece in pieces] == [piece.text for piece in pieces]
    for place, sentence in enumerate(sentences):
        _, after = keys([*sentences[:place], other, *sentences[place + 1 :]])
        (column,) = [column for column, piece in enumerate(pieces) if piece.text.strip() == sentence]
        assert (before - after).abs().amax(-1).nonzero().flatten().tolist() == [column]


def test_functions_have_names():
    def window_softmax(scores, mask, width=1):
        return scores

    names = {
        "scaled dot": scaled_dot,
        "additive": Additive(3),
        "window softmax": window_softmax,
        "window softmax width=3": functools.partial(window_softmax, width=3),
        "window softmax 2 .. width=3": functools.partial(window_softmax, 2, torch.ones(9), width=3),
        "biased": biased(scaled_dot, torch.zeros(1)),
        "test functions have names": lambda scores, mask: scores,
    }
    assert {name: name_function(function) for name, function in names.items()} == {name: name for name in names}
    assert name_function(eval("lambda scores: scores")) == "lambda"


def test_a_target_can_be_forced(predictor):
    found = look(predictor, "abc", target="cab")
    assert found.answer.text == "cab"
    assert len(found.answer.tokens) == 4


def test_the_tree_follows_its_schema(predictor):
    found = look(predictor, "abc")
    name = found.map().name
    for tree in (found.tree(), found.tree(packed=True, full=[], vectors=[name])):
        jsonschema.validate(json.loads(json.dumps(tree)), SCHEMA)
    broken = found.tree()
    del broken["tokens"]["key"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_of_every_task_follows_the_schema(kind):
    found = look_at(kind, best=2)
    for tree in (found.tree(), found.fitting_tree()):
        again = json.loads(json.dumps(tree))
        jsonschema.validate(again, SCHEMA)
        assert again["version"] == 3
        assert again["kind"] == KINDS[kind][1]["kind"]
        assert again["form"] == found.predictor.task.form._asdict()
        groups = {(group["rows"], group["columns"]) for group in again["form"]["groups"]}
        assert {(entry["rows"], entry["columns"]) for entry in again["maps"]} <= groups
        assert len(again["maps"]) == len(found.heads)
    for one in found.maps:
        assert tuple(one.weights.shape[1:]) == (len(found.tokens[one.rows]), len(found.tokens[one.columns]))


def test_answers_carry_what_only_their_task_gives():
    for kind, details in (
        ("classifier", {"probability"}),
        ("reader of words", {"probability"}),
        ("reader of spans", {"probability", "span", "place"}),
        ("transformer", set()),
        ("encoder", set()),
    ):
        found = look_at(kind, best=2)
        for answer, entry in zip(found.answers, found.tree()["answers"], strict=True):
            assert entry == {"text": answer.text, "score": answer.score, **answer.details}
            assert set(answer.details) == details


@pytest.mark.parametrize("kind", ["classifier", "ensemble", "classifier by the mean"])
def test_a_classifier_has_a_log_probability_for_every_class(kind):
    found = look_at(kind, best=2)
    logprobs = found.tree()["scores"]["logprobs"]
    assert len(logprobs) == len(found.tokens["query"]) == 2
    by_name = {answer.text: answer.score for answer in found.answers}
    assert logprobs == pytest.approx([by_name[piece.text] for piece in found.tokens["query"]], abs=1e-5)


def test_packed_maps_are_the_maps(predictor):
    found = look(predictor, "abcd")
    entries = found.tree(packed=True, vectors=[one.name for one in found.maps])["maps"]
    for one, entry in zip(found.maps, entries, strict=True):
        heads = [torch.frombuffer(bytearray(base64.b64decode(part)), dtype=torch.uint8) for part in entry["packed"]]
        bytes_ = torch.stack(heads).view(one.weights.shape) * torch.tensor(entry["scale"])[:, None, None]
        assert_close(bytes_ / 255, one.weights, atol=0.5 / 255 + 1e-6, rtol=0)
        size = len(base64.b64decode(entry["vectors"]["queries"]))
        assert size == 4 * one.weights.shape[0] * one.weights.shape[1] * entry["vectors"]["size"]


def test_names_and_heads_that_are_not_there(predictor):
    found = look(predictor, "abc")
    with pytest.raises(InputError, match=r"there is no map 'x'. This model has .*attention"):
        found.map("x")
    with pytest.raises(InputError, match=r"head 7 was asked for; .* has heads 0 to"):
        found.label(head=7)
    with pytest.raises(InputError, match="nothing to look at in an empty text"):
        look(predictor, " ")


def test_one_map_is_made_alone(predictor, monkeypatch):
    """Asking for one head of one map makes no other, and gives the same."""
    made = []
    weights = Attention.weights
    monkeypatch.setattr(Attention, "weights", lambda *given: made.append(given) or weights(*given))
    found = look(predictor, "abcd")
    every = look(predictor, "abcd").maps
    name = every[0].name
    assert all(one.weights.numel() for one in every)  # which are made when they are asked for
    del made[:]
    alone = found.map(name, 0)
    assert_close(alone.weights, every[0].weights[:1])
    assert len(made) == (1 if len(every) > 1 else len(found.tokens["query"]))  # a recurrent decoder looks at every step
    assert found.find_map() == [one.name for one in every if one.kind == "cross"][-1]
    assert found.heads == {one.name: len(one.weights) for one in every}


def test_maps_that_would_take_too_long_are_refused(predictor, monkeypatch):
    found = look(predictor, "abc")
    monkeypatch.setattr("regard.explain.look.WORK", 1)
    with pytest.raises(InputError, match=r"all maps of this text have [\d,]+ weights, 1 are made at most\. Look at a"):
        found.tree()
    assert found.map(head=0).weights.numel()


def test_a_structure_that_would_fill_the_memory_is_refused(monkeypatch):
    found = look(Predictor(*made("transformer with trees")), "abcab", target="bc")
    name = next(name for name in found.heads if found.is_tree(name))
    monkeypatch.setattr("regard.explain.look.ROOM", 0)
    with pytest.raises(InputError, match=rf"{name} would take 0\.0 GB, for its rows depend on each other; 0 are the"):
        found.map(name)


def test_what_has_no_room_as_numbers_is_given_in_part(predictor, monkeypatch):
    found = look(predictor, "abc" * 20, target="cab" * 20)
    monkeypatch.setattr("regard.explain.look.NUMBERS", 3000)
    tree = found.tree()
    jsonschema.validate(json.loads(json.dumps(tree)), SCHEMA)
    assert all(entry["pooled"] for entry in tree["maps"])
    assert found.tree(packed=True)["maps"][0]["pooled"] is None


def test_maps_of_every_member_are_those_of_an_encoder_and_of_classes():
    found = look_at("ensemble")
    assert [(one.name, one.kind, one.rows, one.columns, one.layer) for one in found.maps] == [
        ("encoder.blocks.0.self_attention", "self", "key", "key", 0),
        ("attention", "cross", "query", "key", 0),
        ("ensemble.0.encoder.blocks.0.self_attention", "self", "key", "key", 0),
        ("ensemble.0.attention", "cross", "query", "key", 0),
    ]


def test_a_block_that_all_layers_share_has_a_map_for_each():
    found = look_at("reader of sentences")
    names = [f"encoder.blocks.0.self_attention#{layer}" for layer in range(2)]
    assert list(found.heads) == [*names, "attention"]
    assert [found.map(name).layer for name in names] == [0, 1]
    assert not torch.equal(*(found.map(name).weights for name in names))


def test_files(predictor, tmp_path):
    found = look(predictor, "abcd")
    for name in ("a.json", "a.html", "a.png", "a.svg"):
        found.save(tmp_path / "new" / name)
    found.save(tmp_path / "grid.png", "all")
    assert (tmp_path / "new" / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads((tmp_path / "new" / "a.json").read_text())["text"]["source"] == "abcd"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.html", "a.json", "a.png", "a.svg"]
    with pytest.raises(InputError, match=r"a.gif ends in '.gif'; expected .html, .json, .png"):
        found.save(tmp_path / "a.gif")


def test_a_title_is_no_formula(predictor, tmp_path):
    found = look(predictor, "abcd")
    source = found.source._replace(text=r"a $\foo$ \\$5 b" + " long" * 20)
    Look(found.predictor, source, found.answers).save(tmp_path / "a.svg")
    assert "foo" in wrap_title(r"a $\foo$", 40)
    assert len(wrap_title("말 " * 200, 40).splitlines()) == 4


def test_a_page_holds_any_text_safely(predictor):
    tree = look(predictor, "abc").tree(packed=True)
    tree["text"]["source"] = "</script><script>alert(1)</script> \u2028 🦊 한국어"
    made = make_page(tree)
    data = re.search(r'<script type="application/json" id="tree">(.*?)</script>', made, re.DOTALL).group(1)
    assert json.loads(data) == tree
    assert "<" not in data
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", made)


def test_a_long_pair_has_a_bounded_page(predictor):
    found = look(predictor, "abcd" * 30, target="dcba" * 30)
    tree = found.fitting_tree(most=60_000)
    assert len(json.dumps(tree)) < 200_000
    assert any(entry["pooled"] for entry in tree["maps"]) or len(tree["maps"]) == 1


def test_words_that_look_at_each_other():
    class Fake:
        def __init__(self, text, answer, pairs):
            self.text, self.pairs = text, pairs
            self.answer = type("A", (), {"text": answer})

        def align_words(self):
            return self.pairs

    there = Fake("two dogs run", "zwei Hunde laufen", [(0, 0), (1, 1), (2, 1)])
    back = Fake("zwei Hunde laufen", "two dogs run", [(0, 0), (1, 1), (2, 2)])
    assert agree(there, back) == [("zwei", "two"), ("Hunde", "dogs")]
    there = Fake("I have seen it", "ich habe es gesehen", [(0, 0), (1, 1), (2, 3), (3, 2)])  # other orders of words
    back = Fake("ich habe es gesehen", "I have seen it", [(0, 0), (1, 3), (2, 3), (3, 1)])
    assert agree(there, back) == [("ich", "I"), ("gesehen", "seen")]


def test_word_alignment_by_hand():
    """Two words each, the second of three and two tokens: the sum over a word's tokens decides, <eos> does not."""
    found = Look(None, Encoded("ab cde", "ab cde", [], [], 0), [Answer("dc ba", 0.0)])
    spans = {"key": [(0, 2), (2, 4), (4, 6), (6, 6)], "query": [(0, 2), (2, 5), (5, 5)]}
    vars(found)["tokens"] = {axis: [Piece("", *span) for span in parts] for axis, parts in spans.items()}
    weights = torch.tensor([[[0.4, 0.3, 0.3, 0.0], [0.35, 0.2, 0.1, 0.35], [0.0, 0.0, 0.0, 1.0]]])
    vars(found)["uses"], vars(found)["structures"] = {}, {}
    vars(found)["outlines"] = {"decoder.attention": Map.of("decoder.attention", "cross", 0, *CROSS, weights)}
    assert found.align_words() == [(0, 1), (1, 0)]


@given(st.text(max_size=30))
def test_pieces_of_an_output_join_to_its_text(text):
    vocabulary = BYTES
    ids = vocabulary.encode(text).ids
    joined = vocabulary.decode(ids)
    found = written_pieces(vocabulary, ids, joined)
    assert len(found) == len(ids)
    assert "".join(piece.text for piece in found) == joined
    assert all(a.end == b.start for a, b in itertools.pairwise(found))


def test_a_drawing_of_faint_weights_is_not_blank():
    weights = torch.tensor([[0.02, 0.01, 0.03, 0.02]])
    assert "█" in draw_map(weights, ["x"], list("abcd"), colour=False).plain
    assert draw_map(weights, ["x"], list("abcd"), colour=False, top=1.0).plain.count("█") == 0


def test_letters_written_downwards_stay_whole():
    family = "\U0001f469\u200d\U0001f467"
    assert split_letters(unicodedata.normalize("NFD", "약é") + family) == ["약", "é", family]
    lines = draw_map(torch.ones(1, 2), ["x"], [unicodedata.normalize("NFD", "약속"), "ab"], most=9).plain.splitlines()
    assert [line.split() for line in lines[:2]] == [["약", "a"], ["속", "b"]]


def test_fonts_that_matplotlib_does_not_know_yet_are_found(monkeypatch):
    font_manager = pytest.importorskip("matplotlib.font_manager")
    known = [path for path in font_manager.findSystemFonts() if "NotoSansCJK-Regular" in path]
    if not known:
        pytest.skip("no Korean font is installed")
    others = [font for font in font_manager.fontManager.ttflist if font.name not in FONTS]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", others)
    assert set(find_fonts()) & set(FONTS)


@pytest.fixture
def only_latin(monkeypatch):
    """A system whose one font is the one that matplotlib brings."""
    font_manager = pytest.importorskip("matplotlib.font_manager")
    own = [font for font in font_manager.fontManager.ttflist if font.name == "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    monkeypatch.setattr(font_manager, "findSystemFonts", list)


@pytest.mark.usefixtures("only_latin")
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_letters_that_no_font_has_are_told_once(tmp_path, kind):
    path = tmp_path / f"why.{kind}"
    with pytest.warns(UserWarning, match="boxes") as told:
        save_map(path, torch.eye(2), ["가", "é"], ["나", "ש"], "다 = 가나")
    (one,) = told
    assert str(one.message).startswith(f"{path}: boxes stand for '가나다': no font with them was found. For Korean")
    assert "apt install fonts-noto-cjk" in str(one.message)
    assert path.stat().st_size
    save_map(path, torch.eye(2), ["a", "é"], ["–", "ש"], "no warning")


@pytest.mark.usefixtures("only_latin")
@pytest.mark.filterwarnings("default:.*boxes stand for")
def test_the_command_line_tells_of_missing_fonts(typed, tiny_run, tmp_path):
    status, out, err = typed("look", tiny_run, "한글", "--out", tmp_path / "why.png")
    assert (status, err.count("regard: ")) == (0, 1)
    assert "why.png: boxes stand for '글한': no font with them was found. For Korean" in err
    assert "written: " in out
    _, _, err = typed("embed", tiny_run, "--picture", tmp_path / "lines.svg", text="漢\nab\n")
    assert "lines.svg: boxes stand for '漢'" in err


def test_a_drawing_is_aligned_in_wide_letters():
    text = draw_map(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), ["이십", "1"], ["스물", "one"], colour=False)
    lines = text.plain.splitlines()
    assert lines[0].split() == ["스물", "one"]
    assert lines[1].startswith("이십  ████ ")
    assert lines[2].startswith("   1       ███")


def test_a_drawing_that_is_too_wide_comes_in_parts():
    weights, columns = torch.eye(30), [f"{n}글" for n in range(30)]
    lines = draw_map(weights, columns, columns, colour=False, most=40).plain.splitlines()
    assert max(map(cell_len, lines)) <= 40
    assert sum("██" in line for line in lines) == 30


BYTES = Vocabulary.learn(["abc"], regard.read("reverse").text.source.model_copy(update={"kind": "byte"}))


# --- soft parents ----------------------------------------------------------------------------------------------------


def test_arcs_in_the_terminal_by_hand():
    parents = torch.nn.functional.one_hot(torch.tensor([1, 1, 3, 1]), 4).double()
    assert draw_arcs(parents, ["a", "b", "c", "d"]).plain.splitlines() == [
        "      ╭──────╮",
        " ╭──╮ │  ╭──╮│",
        " ▼  │*│  ▼  │▼",
        "a   b   c   d",
    ]
    assert "wider than the terminal" in draw_arcs(parents, ["a", "b", "c", "d"], most=10).plain


def test_short_arcs_are_low_and_none_of_one_height_overlap():
    assert place_arcs([1, 1, 3, 1]) == [1, 0, 1, 2]
    parents = [4, 0, 1, 4, 4, 0, 9, 8, 6, 9]
    heights = place_arcs(parents)
    arcs = [(*sorted(pair), height) for *pair, height in zip(range(10), parents, heights, strict=True) if height]
    for (low, high, height), (first, last, other) in itertools.combinations(arcs, 2):
        assert height != other or high <= first or last <= low


@pytest.mark.parametrize("kind", ["rnn with trees", "transformer with trees"])
def test_a_picture_of_trees_has_arcs(kind, tmp_path):
    found = look(Predictor(*made(kind)), "abcab", target="bc")
    trees = [one.name for one in found.maps if one.kind == "tree"]
    others = [one.name for one in found.maps if one.kind == "cross"]
    assert [found.is_tree(name) for name in (*trees, *others)] == [True] * len(trees) + [False] * len(others)
    sizes = []
    for name in (trees[0], others[0]):
        found.save(tmp_path / "map.svg", name)
        sizes.append((tmp_path / "map.svg").read_text().count("<path"))
    assert sizes[0] > sizes[1]
    assert found.find_map() == others[-1]


def test_no_token_ends_before_it_begins():
    """A later token may take back what an earlier one seemed to have written."""
    begun = iter(["ab", "aX", "abc"])
    vocabulary = SimpleNamespace(continued=lambda prompt, ids: next(begun))
    assert [piece[1:] for piece in written_pieces(vocabulary, [4, 5, 6], "abc")] == [(0, 2), (2, 2), (2, 3)]
