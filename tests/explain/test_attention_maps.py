"""The form of what was looked at: figures by hand, and numbers that give again what the model went on with."""

import base64
import itertools

import pytest
import torch
from every_task import KINDS, a_source, made
from oracles import shaken
from random_runs import drawn
from rich.console import Console
from torch.testing import assert_close

import regard
from regard.data.vocabulary import EOS
from regard.explain.attention_maps import PICTURE, WHOLE, Calculation, Map
from regard.explain.look import look
from regard.explain.plots import tabulate_calculation
from regard.inference.predictor import Predictor
from regard.nn.attention import Attention

BLIND = ("rnn without attention", "tagger over features", "captioner without attention")
ATTENTIVE = [kind for kind in KINDS if kind not in BLIND]
FORMS = [("transformer", "alibi"), ("transformer", "rotary"), ("language model", "alibi"), ("transformer", "learned")]


def looked_at(kind):
    """A look at a model of drawn weights."""
    task, model = made(kind)
    torch.manual_seed(5)
    return look(Predictor(task, shaken(model)), a_source(task), best=2)


# --- figures ---------------------------------------------------------------------------------------------------------


def of(weights, kind="self"):
    return Map.of("x", kind, 0, "key", "key", torch.tensor([weights]))


def test_entropy_is_in_bits():
    """One place is 0 bits, eight equal ones are 3; the rows of a head have their mean."""
    eight, one, half = [1 / 8] * 8, [1.0, *[0.0] * 7], [1 / 2, 1 / 4, 1 / 4, *[0.0] * 5]
    assert of([eight]).entropy() == pytest.approx([3])
    assert of([one]).entropy() == [0]
    assert of([half]).entropy() == pytest.approx([1.5])
    assert of([eight, one, half, half], "cross").entropy() == pytest.approx([(3 + 0 + 1.5 + 1.5) / 4])


def test_distance_is_how_far_to_either_side():
    """Two tokens back is as far as two ahead, and both do not cancel out."""
    assert of([[0, 0, 1.0, 0], [0, 0, 0, 1.0], [1.0, 0, 0, 0], [0, 1.0, 0, 0]]).distance() == [2]
    assert of([[1.0, 0, 0], [0.5, 0, 0.5], [0, 0, 1.0]]).distance() == pytest.approx([1 / 3])
    assert of([[1.0]], "cross").distance() is None


def test_a_small_picture_keeps_the_peaks():
    weights = torch.zeros(1, 150, 100)
    weights[0, 37, 61] = 1.0
    packed = Map.of("x", "cross", 0, "query", "key", weights).tree(packed=True, form=PICTURE)
    (picture,) = (torch.frombuffer(bytearray(base64.b64decode(head)), dtype=torch.uint8) for head in packed["packed"])
    high, wide = packed["tile"]
    assert packed["pooled"] == [-(-150 // high), -(-100 // wide)]
    assert max(packed["pooled"]) <= 48
    assert picture.view(packed["pooled"])[37 // high, 61 // wide] == 255


# --- numbers ---------------------------------------------------------------------------------------------------------


def outputs_of(found):
    """What every attention gave to the rest of the model in the pass that a look is made of."""
    given: dict[str, list[torch.Tensor]] = {}
    model = found.predictor.model
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, Attention)]
    hooks = [
        part.register_forward_hook(lambda part, inputs, output, name=name: given.setdefault(name, []).append(output[0]))
        for name, part in parts
    ]
    found.uses  # noqa: B018 (makes the pass)
    for hook in hooks:
        hook.remove()
    return given


def assert_calculated(found):
    given = outputs_of(found)
    assert found.uses
    for name, heads in ((name, found.heads[name]) for name in found.uses):
        path, _, number = name.partition("#")
        parts = given[path]
        wanted = parts[int(number)] if number else torch.cat(parts)  # a recurrent decoder's come one after another
        attention = found.predictor.model.get_submodule(path)
        rows = [[found.calculate(row, head, name) for head in range(heads)] for row in range(len(wanted))]
        contexts = torch.stack([torch.cat([one.context for one in row]) for row in rows])
        with torch.inference_mode():
            assert_close(attention.output(contexts), wanted, atol=1e-5, rtol=1e-4)
        weights = torch.stack([torch.stack([one.weights for one in row]) for row in rows], dim=1)
        assert_close(weights, found.map(name).weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ATTENTIVE)
def test_calculations_are_what_the_model_went_on_with(kind):
    """Of every row and head: the weights are the map's, and the sum of weights times values is what came out."""
    assert_calculated(looked_at(kind))


@pytest.mark.parametrize(("kind", "positions"), FORMS)
def test_calculations_know_positions_and_shared_keys(tmp_path, kind, positions):
    run = drawn(tmp_path / "run", kind, f"model.positions={positions}", "model.kv_heads=2")
    assert_calculated(look(regard.load(run, device="cpu", engine="torch"), "abcde"))


def unpack(entry, name, heads, size):
    numbers = torch.frombuffer(bytearray(base64.b64decode(entry["vectors"][name])), dtype=torch.float32)
    return numbers.view(heads, -1, size)


def weigh(entry):
    """A map and its contexts made again of the vectors that come with it, as the page does: no more is known there."""
    vectors, (heads, rows, columns) = entry["vectors"], entry["shape"]
    queries, keys, values = (unpack(entry, name, heads, vectors["size"]) for name in ("queries", "keys", "values"))
    if vectors["vector"] is not None:
        vector = torch.frombuffer(bytearray(base64.b64decode(vectors["vector"])), dtype=torch.float32)
        scores = (queries[:, :, None] + keys[:, None]).tanh() @ vector
    else:
        scores = queries @ keys.transpose(1, 2) / (vectors["size"] ** 0.5 if vectors["score"] == "scaled dot" else 1)
    far = (torch.arange(columns) - torch.arange(rows)[:, None]).abs()
    scores = scores - torch.tensor(vectors["slopes"] or [0.0] * heads).abs()[:, None, None] * far
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    hidden[:, vectors["hidden"]] = True
    if vectors["causal"]:
        hidden |= torch.ones(rows, columns, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return weights, weights @ values


def assert_weighed(found):
    names = list(found.heads)
    for name, entry in zip(names, found.tree(vectors=names)["maps"], strict=True):
        if name in found.structures:
            continue
        if (entry["vectors"]["normalizer"], entry["vectors"]["score"] == "cosine") != ("softmax", False):
            continue  # the page says that it cannot repeat these
        weights, contexts = weigh(entry)
        assert_close(weights, torch.tensor(entry["heads"]), atol=1e-5, rtol=1e-4)
        for head, row in itertools.product(*map(range, weights.shape[:2])):
            assert_close(contexts[head, row], found.calculate(row, head, name).context, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ATTENTIVE)
def test_vectors_are_all_that_a_map_was_made_of(kind):
    assert_weighed(looked_at(kind))


@pytest.mark.parametrize(("kind", "positions"), FORMS)
def test_vectors_know_positions_and_shared_keys(tmp_path, kind, positions):
    run = drawn(tmp_path / "run", kind, f"model.positions={positions}", "model.kv_heads=2")
    assert_weighed(look(regard.load(run, device="cpu", engine="torch"), "abcde"))


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_one_map_of_several_heads_is_their_mean():
    found = looked_at("transformer")
    for name in found.heads:
        weights, rows, columns = found.label(name)
        assert_close(weights, found.map(name).weights.mean(0))
        assert_close(weights.sum(-1), torch.ones(len(rows)))
        assert weights.shape == (len(rows), len(columns))


def test_a_page_with_little_room_has_the_map_from_answer_to_source_first(monkeypatch):
    """There is room for the largest map alone, which is another."""
    monkeypatch.setattr("regard.explain.attention_maps.LARGEST", 10)
    found = look(Predictor(*made("transformer")), "abcdeabcde" * 2, target="edcbaedcba" * 3)
    small = [one.measure(PICTURE, packed=True) for one in found.maps]
    whole = [one.measure(WHOLE, packed=True) for one in found.maps]
    assert whole == [one.weights.numel() * 4 // 3 for one in found.maps]
    more = {one.name: large - little for one, large, little in zip(found.maps, whole, small, strict=True)}
    (cross,) = (one.name for one in found.maps if one.kind == "cross")
    largest = max(more, key=more.get)
    assert more[cross] < more[largest]
    tree = found.fitting_tree(most=sum(small) + more[largest])
    pooled = {entry["name"]: bool(entry["pooled"]) for entry in tree["maps"]}
    assert (pooled[cross], pooled[largest]) == (False, True)


@pytest.mark.parametrize(("length", "flags"), [(11, []), (12, ["is short: 1 tokens for a source of 12"])])
def test_what_is_suspicious_is_judged_without_the_end_of_the_source(length, flags):
    task, model = made("transformer")
    with torch.no_grad():
        model.output.bias[EOS] = 40.0
    settings = task.config.decode.model_copy(update={"min_length": 1})
    found = look(Predictor(task, model), ("abcde" * 3)[:length], settings=settings)
    assert (len(found.answer.tokens), found.answer.flags) == (2, flags)


def test_a_table_says_which_keys_are_hidden():
    seen = torch.tensor([True, False])
    ones = torch.ones(2)
    found = Calculation(ones, torch.eye(2), torch.eye(2), ones, ones, seen, torch.tensor([1.0, 0.0]), ones)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(tabulate_calculation(found, ["first", "second"]))
    rows = {line.split()[0]: line.split() for line in shown.get().splitlines() if line.strip()}
    assert rows["first"][1:4] == ["+1.000", "+1.000", "1.0000"]
    assert rows["second"][1:4] == ["+1.000", "hidden", "0.0000"]
