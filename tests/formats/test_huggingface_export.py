"""What we export gives our numbers in transformers, and again when it is imported."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from foreign import TEXTS, bert, gpt2, llama, llama_biased, logits_of_language, marian, ours
from random_runs import drawn
from safetensors.torch import load_file
from serving import classifier_run
from torch.testing import assert_close

from regard.config.toml import validate
from regard.data.batching import Batch, pad_sources
from regard.data.vocabulary import BOS, EOS, PAD, Vocabularies, Vocabulary
from regard.errors import ConfigError, RunError
from regard.formats.huggingface_export import export_huggingface, find_architecture
from regard.formats.huggingface_import import DEAD, import_run
from regard.inference.load import load
from regard.tasks import make_task
from regard.training.checkpoint import get_weights, load_tensors, save_weights

LANGUAGES = {
    "GPT2LMHeadModel": {"positions": "learned", "activation": "gelu tanh"},
    "GPT2LMHeadModel relu": {"positions": "sinusoidal", "bias": False, "add_bos": False, "tie_embeddings": False},
    "GPT2LMHeadModel none": {"positions": "none", "activation": "gelu", "embedding_scale": False, "bias": False},
    "GPTNeoXForCausalLM": {"positions": "rotary", "activation": "gelu", "rotary_base": 300.0, "norm_epsilon": 1e-6},
    "LlamaForCausalLM": {
        "positions": "rotary", "norm_kind": "rms", "gated": True, "activation": "silu", "bias": False, "kv_heads": 2,
        "embedding_scale": False,
    },
    "LlamaForCausalLM scaled": {
        "positions": "rotary", "norm_kind": "rms", "gated": True, "activation": "gelu", "bias": False, "layers": 2,
    },
}  # fmt: skip
TRANSLATORS = {
    "MarianMTModel": {"norm": "post", "activation": "silu"},
    "PegasusForConditionalGeneration": {},
    "BartForConditionalGeneration": {"norm": "post", "positions": "learned", "embedding_norm": True},
    "MBartForConditionalGeneration": {
        "positions": "learned", "embedding_norm": True, "embedding_scale": False, "activation": "gelu",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_language_model_goes_there_and_back(tmp_path, name):
    predictor = ours(tmp_path / "run", **{"layers": 3, **LANGUAGES[name]})
    assert export_huggingface(tmp_path / "run", tmp_path / "out") == name.split()[0]
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    import_run(tmp_path / "out", tmp_path / "back")
    back = load(tmp_path / "back")
    assert back.source.dump() == predictor.source.dump()
    apart = {"lm_head.weight", "embed_out.weight"} & load_file(tmp_path / "out" / "model.safetensors").keys()
    assert other.config.tie_word_embeddings == (not apart)
    for text in ("the dog", TEXTS[1], "a"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert ids[0].tolist() == predictor.encode([text])[0].ids == back.encode([text])[0].ids
        wanted = logits_of_language(predictor, text)
        with torch.no_grad():
            assert_close(other(ids).logits, wanted, atol=2e-5, rtol=1e-5)
        assert_close(logits_of_language(back, text), wanted, atol=2e-5, rtol=1e-5)
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == predictor.source.decode(ids[0].tolist())


def test_an_embedding_that_came_back_wider(tmp_path, monkeypatch):
    """transformers can pad the rows of an embedding to a round number: entries that no text has. The folder may be the
    one that we stand in."""
    predictor = ours(tmp_path / "run", "language model", layers=1, positions="learned", activation="gelu tanh")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    export_huggingface(tmp_path / "run", Path("."))
    monkeypatch.chdir(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model.resize_token_embeddings(pad_to_multiple_of=64)
    model.save_pretrained(tmp_path / "out")
    import_run(tmp_path / "out", tmp_path / "back")
    back = load(tmp_path / "back")
    assert back.source.size > predictor.source.size
    (one,), (other,) = predictor.encode(["the dog"]), back.encode(["the dog"])
    assert back.source.decode(other.ids) == predictor.source.decode(one.ids)


@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_translator_goes_there_and_back(tmp_path, name):
    predictor = ours(tmp_path / "run", "transformer", encoder_layers=2, decoder_layers=3, **TRANSLATORS[name])
    assert export_huggingface(tmp_path / "run", tmp_path / "out") == name
    other = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    import_run(tmp_path / "out", tmp_path / "back")
    back = load(tmp_path / "back")
    target = torch.tensor([[BOS, 9, 8, 7, 6, 5]])
    for text in ("the dog", TEXTS[1][:6], "a"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        assert ids[0].tolist() == predictor.encode([text])[0].ids
        batch = Batch(*pad_sources(ids.tolist()), target, target)
        with torch.no_grad():
            wanted = predictor.model.logits(batch)
            assert_close(other(ids, decoder_input_ids=target).logits, wanted, atol=2e-5, rtol=1e-5)
            assert_close(back.model.logits(batch), wanted, atol=2e-5, rtol=1e-5)
        written = other.generate(ids, num_beams=1, do_sample=False, max_new_tokens=12)[0, 1:].tolist()
        written = written[: written.index(EOS)] if EOS in written else written
        settings = predictor.config.decode.model_copy(update={"beam_size": 1, "max_ratio": 0.0, "max_extra": 12})
        tokens = [token.id for token in predictor.predict([text], settings=settings)[0][0].tokens[:-1]]
        assert tokens[: len(written)] == written


def drawn_to_specials(folder):
    """The run, with weights that would write <pad> and <bos> if they were let."""
    path = folder / "model.safetensors"
    tensors = load_tensors(path)
    tensors["output.weight" if "output.weight" in tensors else "source_embedding.weight"][[PAD, BOS]] *= 10
    save_weights(path, tensors, 0)
    return load(folder, ["decode.beam_size=1", "decode.max_ratio=0", "decode.max_extra=12"], engine="torch")


def written_there(model, tokenizer, texts):
    """What transformers' generate() writes to all texts together, as ids; its settings are the exported ones."""
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    start = 1 if model.config.is_encoder_decoder else batch.input_ids.shape[1]
    written = model.generate(**batch, num_beams=1, do_sample=False, max_new_tokens=13)[:, start:].tolist()
    return [(row[: row.index(EOS)] if EOS in row else row)[:12] for row in written]


@pytest.mark.parametrize("name", [*LANGUAGES, *TRANSLATORS])
def test_texts_of_unequal_lengths_are_written_as_here(tmp_path, name):
    """In one batch, so padding must be on the side that the model wants; <pad> and <bos> are never written."""
    if name in LANGUAGES:
        ours(tmp_path / "run", **{"layers": 2, **LANGUAGES[name]})
    else:
        ours(tmp_path / "run", "transformer", encoder_layers=2, decoder_layers=2, **TRANSLATORS[name])
    predictor = drawn_to_specials(tmp_path / "run")
    export_huggingface(tmp_path / "run", tmp_path / "out")
    other = getattr(transformers, name.split()[0]).from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = ["a", "the dog", "the street was", "one two"]
    wanted = [[token.id for token in answer.tokens[:-1]] for (answer,) in predictor.predict(texts)]
    assert written_there(other, tokenizer, texts) == wanted
    assert len({tuple(row) for row in wanted}) > 1
    other.generation_config.bad_words_ids = None
    assert any({PAD, BOS} & set(row) for row in written_there(other, tokenizer, texts))  # it would, if it were let


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_an_encoder_goes_there_and_back(tmp_path, positions):
    form = {"norm": "post", "embedding_norm": True, "positions": positions, "activation": "gelu", "norm_epsilon": 1e-7}
    predictor = ours(tmp_path / "run", "encoder", layers=3, **form)
    assert export_huggingface(tmp_path / "run", tmp_path / "out") == "BertModel"
    other = transformers.AutoModel.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    import_run(tmp_path / "out", tmp_path / "back")
    back = load(tmp_path / "back")
    for text in ("the dog", TEXTS[1][:6], "a"):
        encoded = tokenizer(text, return_tensors="pt")
        assert encoded.input_ids[0].tolist() == predictor.encode([text])[0].ids
        source = pad_sources(encoded.input_ids.tolist())
        with torch.no_grad():
            wanted = predictor.model.states(*source)[0]
            assert_close(other(**encoded).last_hidden_state, wanted, atol=2e-5, rtol=1e-5)
            assert_close(back.model.states(*source)[0], wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [gpt2, llama, llama_biased, marian, bert])
def test_what_came_in_goes_out(tmp_path, make):
    """An imported model, exported, writes what it was; entries that are never written stay so, or are told."""
    made, _ = make(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "run")
    assert export_huggingface(tmp_path / "run", tmp_path / "out") == type(made).__name__
    import_run(tmp_path / "out", tmp_path / "back")
    one, two = load(tmp_path / "run"), load(tmp_path / "back")
    assert one.encode([TEXTS[0]])[0].ids == two.encode([TEXTS[0]])[0].ids
    if make is bert:
        with torch.no_grad():
            batch = pad_sources([one.encode([TEXTS[0]])[0].ids])
            assert_close(one.model.states(*batch)[0], two.model.states(*batch)[0], atol=1e-5, rtol=1e-5)
        return
    if make is marian:
        source = pad_sources([one.encode(["the dog"])[0].ids])
        batch = Batch(*source, torch.tensor([[2, 9, 8]]), torch.tensor([[9, 8, 3]]))
        assert_close(one.model.logits(batch), two.model.logits(batch), atol=1e-5, rtol=1e-5)
        return
    assert_close(
        logits_of_language(one, TEXTS[0]).log_softmax(-1).exp(),
        logits_of_language(two, TEXTS[0]).log_softmax(-1).exp(),
        atol=1e-5, rtol=1e-4,
    )  # fmt: skip


def test_texts_of_an_exported_encoder_are_padded_as_ours_are(tmp_path):
    form = {"norm": "post", "embedding_norm": True, "positions": "learned", "activation": "gelu", "layers": 2}
    predictor = ours(tmp_path / "run", "encoder", **form)
    export_huggingface(tmp_path / "run", tmp_path / "out")
    model = transformers.AutoModel.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer(["a", "the dog runs", "the"], padding=True, return_tensors="pt")
    ids, lengths = pad_sources([one.ids for one in predictor.encode(["a", "the dog runs", "the"])])
    assert inputs.input_ids.tolist() == ids.tolist()
    with torch.no_grad():
        found, wanted = model(**inputs).last_hidden_state, predictor.model.states(ids, lengths)[0]
    for row, length in enumerate(lengths.tolist()):
        assert_close(found[row, :length], wanted[row, :length], atol=2e-5, rtol=1e-5)
    assert tokenizer("a").input_ids == [
        tokenizer.cls_token_id,
        *ids[0, 1 : lengths[0] - 1].tolist(),
        tokenizer.sep_token_id,
    ]


@pytest.mark.parametrize("kind", ["language model", "encoder", "transformer"])
def test_an_exported_tokenizer_keeps_the_longest_text_whole(tmp_path, kind):
    forms = {
        "language model": {"layers": 1, "positions": "learned"},
        "encoder": {"layers": 1, "norm": "post", "embedding_norm": True, "positions": "learned"},
        "transformer": {"encoder_layers": 1, "decoder_layers": 1},
    }
    predictor = ours(tmp_path / "run", kind, text=9, **forms[kind])
    export_huggingface(tmp_path / "run", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    most = 9 - len(predictor.task.frame()[0]) if kind == "language model" else 9  # the context counts its <bos>
    (longest,) = predictor.encode(["a" * most])
    assert longest.length == 9
    assert tokenizer("a" * most, truncation=True).input_ids == longest.ids
    assert len(tokenizer("a" * (most + 1), truncation=True).input_ids) == len(longest.ids)


@pytest.mark.parametrize(("make", "lines"), [(llama, 1), (gpt2, 0)])
def test_entries_that_stay_in_the_softmax_are_told(tmp_path, make, lines):
    make(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "run")
    told = []
    export_huggingface(tmp_path / "run", tmp_path / "out", told.append)
    assert len(told) == lines
    assert all(line.startswith("4 entries that this run never writes take part in the softmax there") for line in told)
    never = (
        (load_tensors(tmp_path / "run" / "model.safetensors")["output.bias"] <= DEAD / 2).nonzero().flatten().tolist()
    )
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings.get("suppress_tokens", []) == (never if lines else [])
    assert settings["bad_words_ids"] == [[PAD], [BOS]]


def test_a_text_never_turns_into_a_special_entry(tmp_path):
    predictor = ours(tmp_path / "run", layers=1, positions="learned")
    export_huggingface(tmp_path / "run", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("a <eos> b", "<pad>", "<bos>x"):
        assert tokenizer(text).input_ids == predictor.encode([text])[0].ids
        assert tokenizer([text])["input_ids"] == [predictor.encode([text])[0].ids]


REFUSED = {
    "it is recurrent": {"kind": "rnn"},
    "it is a reader": {"kind": "reader"},
    "it copies from the source": {"kind": "transformer", "size": 24, "heads": 4, "pointer_generator": True},
    "pre-norm, rotary positions, embedding_norm False": {"kind": "transformer", "positions": "rotary"},
    "model.bias False, model.tie_embeddings True": {"kind": "transformer", "bias": False},
    "norm_kind rms, gated False, with sinusoidal positions": {"kind": "transformer", "norm_kind": "rms"},
    "post-norm in a model of kind language model": {"kind": "language model", "norm": "post"},
    "a decoder with alibi positions": {"kind": "language model", "positions": "alibi"},
    "fewer heads of keys": {"kind": "language model", "positions": "rotary", "kv_heads": 2},
    "not softmax's .model.normalize matching": {"kind": "transformer", "normalize": "matching"},
    "not softmax's .model.normalize segments": {"kind": "language model", "normalize": "segments"},
    "pre-norm in a model of kind encoder": {"kind": "encoder"},
    "an encoder with learned positions, embedding_norm False": {
        "kind": "encoder", "norm": "post", "positions": "learned"
    },
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_equal_says_why(why):
    tree = {"data": {"kind": "reverse"}, "model": REFUSED[why]}
    config = validate(tree, "test")
    vocabulary = Vocabulary.learn(["abc"], config.text.source)
    task = make_task(config, Vocabularies(vocabulary, vocabulary))
    with pytest.raises(ConfigError, match=why):
        find_architecture(task, get_weights(task.build()))


def test_two_vocabularies_have_no_equal(tmp_path):
    run = drawn(tmp_path / "run", "transformer", "text.target.kind=char", "text.target.min_count=1")
    with pytest.raises(ConfigError, match=r"run cannot be exported, .* two vocabularies"):
        export_huggingface(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_cannot_be_names_the_run(tmp_path, tiny_run):
    with pytest.raises(ConfigError, match=f"{tiny_run} cannot be exported, .* it is recurrent"):
        export_huggingface(tiny_run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    classifier_run(tmp_path / "classes", 1)
    with pytest.raises(ConfigError, match=r"classes cannot be exported, .* it is a classifier, with an attention"):
        export_huggingface(tmp_path / "classes", tmp_path / "out")
    rms = {"positions": "rotary", "norm_kind": "rms", "gated": True, "activation": "silu", "layers": 1}
    ours(tmp_path / "run", **rms)
    with pytest.raises(ConfigError, match=r"its output has a bias, and Llama's has none \(model.bias = false"):
        export_huggingface(tmp_path / "run", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RunError, match="full is there already"):
        export_huggingface(tiny_run, tmp_path / "full")
