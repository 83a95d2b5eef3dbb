"""Looks at long texts: by strips, by blocks, in part; always with the numbers of the dense map."""

import base64
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from long_runs import ATTENTIONS, LONG, long_predictor, long_text
from random_runs import drawn
from torch.testing import assert_close

from regard.errors import InputError
from regard.explain.attention_maps import PICTURE, WHOLE, Form
from regard.explain.look import look

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "maps.schema.json").read_text(encoding="utf-8"))
KINDS = [*(("classifier", name) for name in ATTENTIONS), ("language model", "bigbird"), ("language model", "window")]
SMALL = {"window": {"window_size": 5}, "bigbird": {"block": 5}, "linformer": {"slots": 11}, "full": {}}


def look_at(kind, attention, letters, **own):
    predictor = long_predictor(kind, attention, letters, **own)
    target = {"target": "abc"} if kind == "language model" else {}
    return look(predictor, long_text(letters, 8), **target)


@pytest.fixture(params=KINDS, ids=" ".join)
def found(request, monkeypatch):
    """A look whose maps are as long ones are, and the same weights as dense tensors."""
    kind, attention = request.param
    monkeypatch.setattr("regard.explain.attention_maps.DENSE", 2000)
    monkeypatch.setattr("regard.explain.uses.STRIP", 3000)
    found = look_at(kind, attention, 190, **SMALL[attention])
    assert any(one.is_long for one in found.maps)
    assert any(one.gathered for one in found.maps) == (attention in ("window", "bigbird"))
    return found


def dense(found, one):
    """The map by the dense equation."""
    with torch.inference_mode():
        if one.kind == "gathered":
            use = found.uses[one.name.removesuffix(".slots")]
            return use.attention.slots.shares(use.tokens, None)[0]
        use = found.uses[one.name]
        return torch.cat(
            [
                use.attention.weights(queries, use.kv, mask)[0]
                for queries, mask in zip(use.queries, use.masks, strict=True)
            ],
            dim=-2,
        )


def unpack(parts, kind):
    return torch.from_numpy(np.stack([np.frombuffer(base64.b64decode(part), kind).astype("float32") for part in parts]))


def fill_blocks(entry):
    """The dense map of an entry whose weights are in blocks."""
    (heads, rows, columns), blocks = entry["shape"], entry["blocks"]
    found, size = torch.zeros(heads, rows, columns), blocks["size"]
    for head, lines in enumerate(blocks["weights"]):
        for row, line in enumerate(lines):
            seen = [one * size + at for one in blocks["seen"][row // size] for at in range(size)]
            found[head, row, [one for one in seen if one < columns]] = torch.tensor(line)
    return found


def test_every_map_is_the_dense_one_whatever_its_form(found):
    for one in found.maps:
        wanted = dense(found, one)
        assert (
            one.shape
            == tuple(wanted.shape)
            == (len(wanted), *(len(found.tokens[axis]) for axis in (one.rows, one.columns)))
        )
        assert_close(one.weights, wanted, atol=1e-6, rtol=1e-5)
        entry = one.tree(packed=False, form=WHOLE)
        given = fill_blocks(entry) if one.gathered else torch.tensor(entry["heads"])
        assert_close(given, wanted, atol=1e-6, rtol=1e-5)
        assert (entry["pooled"] is None) == (not one.gathered)


def test_packed_blocks_are_their_bytes_alone(found):
    for one in found.maps:
        if one.gathered:
            plain, entry = (one.tree(packed=packed, form=WHOLE) for packed in (False, True))
            numbers = torch.tensor([[weight for row in head for weight in row] for head in plain["blocks"]["weights"]])
            packed = unpack(entry["blocks"]["weights"], "u1") / 255 * torch.tensor(entry["scale"])[:, None]
            assert numbers.numel() == one.count() < torch.Size(one.shape).numel()
            assert_close(packed, numbers, atol=0.5 / 255 + 1e-5, rtol=0)


def test_the_largest_of_each_row_and_what_is_left_out(found):
    for one in found.maps:
        wanted = dense(found, one)
        form = Form("top", min(8, one.shape[2] - 1))
        plain, entry = (one.tree(packed=packed, form=form) for packed in (False, True))
        best = wanted.topk(form.most)
        assert_close(torch.tensor(plain["top"]["weights"]), best.values, atol=1e-6, rtol=1e-5)
        columns, some = torch.tensor(plain["top"]["columns"]), best.values > 0  # a weight of 0 is of no column
        assert_close(wanted.gather(-1, columns)[some], best.values[some], atol=1e-6, rtol=1e-5)
        assert_close(torch.tensor(plain["top"]["left"]), 1 - best.values.sum(-1), atol=1e-4, rtol=0)
        shape = (*one.shape[:2], form.most)
        assert torch.equal(unpack(entry["top"]["columns"], "<u2").view(shape).long(), columns)
        weights = (
            unpack(entry["top"]["weights"], "<u2").view(shape) / 65535 * torch.tensor(entry["scale"])[:, None, None]
        )
        assert_close(weights, best.values, atol=1e-4, rtol=1e-4)
        assert_close(unpack(entry["top"]["left"], "<u2") / 65535, torch.tensor(plain["top"]["left"]), atol=1e-4, rtol=0)
        high, wide = entry["tile"]
        tiles = (
            unpack(entry["packed"], "u1").view(-1, *entry["pooled"]) / 255 * torch.tensor(entry["scale"])[:, None, None]
        )
        peaks = torch.nn.functional.max_pool2d(wanted, (high, wide), ceil_mode=True)
        assert_close(tiles, peaks, atol=0.5 / 255 + 1e-5, rtol=0)


def test_a_tree_has_as_much_as_there_is_room_for(found):
    sizes, least = [], sum(one.measure(PICTURE, packed=True) for one in found.maps)
    for packed, room in ((True, least), (True, least + 12_000), (True, None), (False, least), (False, None)):
        tree = found.tree(packed=packed, room=room)
        if packed:  # numbers take long to be checked
            jsonschema.validate(json.loads(json.dumps(tree)), SCHEMA)
        forms = found.plan(packed=packed, room=room)
        size = sum(one.measure(forms[one.name], packed) for one in found.maps)
        assert room is None or size <= room
        sizes.append(size)
        for entry, one in zip(tree["maps"], found.maps, strict=True):
            if packed:
                texts = [*entry["packed"], *entry.get("blocks", {}).get("weights", [])]
                texts += [
                    text for name in ("columns", "weights", "left") for text in entry.get("top", {}).get(name, [])
                ]
                assert abs(sum(map(len, texts)) - one.measure(forms[one.name], packed)) <= 4 * len(texts) + 4
    assert sizes[0] < sizes[1] <= sizes[2]
    assert sizes[3] < sizes[4]


def test_a_row_is_calculated_alone(found):
    for one in found.maps:
        if one.name in found.uses:
            wanted = dense(found, one)
            for head, row in ((0, 0), (1, one.shape[1] - 1)):
                numbers = found.calculate(row, head, one.name)
                assert_close(numbers.weights, wanted[head, row], atol=1e-6, rtol=1e-5)
                assert not numbers.weights[~numbers.seen].any()
            assert [column for _, column in found.align(one.name)] == wanted.mean(0).argmax(-1).tolist()


def test_numbers_follow_the_schema(found):
    """Of little room, so that some of each form are there."""
    tree = found.tree(room=4000)
    jsonschema.validate(json.loads(json.dumps(tree)), SCHEMA)
    assert any(entry["pooled"] for entry in tree["maps"])


@pytest.mark.parametrize("found", [("classifier", "bigbird"), ("classifier", "linformer")], indirect=True, ids=" ".join)
def test_what_is_drawn_of_a_long_map_are_its_tiles(found, tmp_path):
    name = next(one.name for one in found.maps if one.is_long)
    weights, rows, columns = found.label(name)
    assert weights.shape == (len(rows), len(columns))
    assert max(weights.shape) <= 48
    assert [int(row) for row in rows] == list(range(0, found.map(name).shape[1], found.map(name).drawn_tile[0]))
    assert "each cell the largest of" in found.title(name)
    found.save(tmp_path / "why.png", name)
    found.save(tmp_path / "all.svg", "all")
    found.save(tmp_path / "why.html")
    assert (tmp_path / "why.png").stat().st_size


def test_slots_have_an_axis_of_their_own():
    found = look_at("encoder", "linformer", 40, **SMALL["linformer"])
    kinds = [(one.name, one.kind, one.rows, one.columns, one.shape) for one in found.maps]
    name = "encoder.blocks.0.self_attention"
    tokens = len(found.tokens["key"])
    assert kinds[:2] == [
        (f"{name}.slots", "gathered", "slot", "key", (1, 11, tokens)),
        (name, "slots", "key", "slot", (2, tokens, 11)),
    ]
    assert [piece.text for piece in found.tokens["slot"][:2]] == ["slot 1", "slot 2"]
    assert found.find_map() == "encoder.blocks.1.self_attention"
    assert {one.distance() for one in found.maps} == {None}
    jsonschema.validate(json.loads(json.dumps(found.tree())), SCHEMA)
    with pytest.raises(InputError, match="shows marginals"):
        found.calculate(0, 0, f"{name}.slots")


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that was made."""

    most = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        found = function(*arguments, **(named or {}))
        parts = found if isinstance(found, tuple | list) else [found]
        self.most = max([self.most, *(part.numel() for part in parts if isinstance(part, torch.Tensor))])
        return found


@pytest.mark.parametrize(("kind", "attention"), KINDS)
def test_no_tensor_is_as_large_as_queries_times_keys(kind, attention, monkeypatch):
    monkeypatch.setattr("regard.explain.uses.STRIP", 2**18)
    with Largest() as mode:
        found = look_at(kind, attention, 2200)
        tree = found.fitting_tree()
        found.label()
        found.calculate(2000 if kind == "language model" else 0)
    assert 2200 < mode.most < 2200 * 2200 / 4
    assert len(json.dumps(tree["maps"])) < 3_100_000


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "attention"), KINDS[1:])
def test_16384_tokens(kind, attention, tmp_path):
    with Largest() as mode:
        found = look_at(kind, attention, LONG)
        found.save(tmp_path / "why.html")
    assert mode.most < LONG * LONG / 8
    page = (tmp_path / "why.html").read_text(encoding="utf-8")
    tree = json.loads(page.split('id="tree">')[1].split("</script>")[0])
    jsonschema.validate(tree, SCHEMA)
    assert len(json.dumps(tree["maps"])) < 3_200_000
    whole = ("top" in one or one["pooled"] is None or "weights" in one.get("blocks", {}) for one in tree["maps"])
    assert any(whole)


def test_the_command_line_looks_at_a_long_text(typed, tmp_path):
    own = ("model.attention=bigbird", "model.block=32", "text.max_length=4000")
    run = drawn(tmp_path / "run", "language model", *own, "decode.max_extra=20")
    text = "the quick brown fox " * 120
    status, out, err = typed("look", run, text, "--target", "fox")
    assert (status, err) == (0, "")
    assert "each cell the largest of" in out
    status, out, err = typed("look", run, text, "--target", "fox", "--token", "2000")
    assert (status, err) == (0, "")
    assert "others" in out
    assert len(out.splitlines()) < 300
    status, out, err = typed("look", run, text, "--target", "fox", "--map", "all")
    assert (status, err) == (0, "")
    assert "decoder.blocks.1.self_attention" in out
