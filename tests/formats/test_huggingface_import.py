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
from torch.testing import assert_close
from typer.testing import CliRunner

from regard.cli.commands import app
from regard.config.toml import read
from regard.data.batching import Batch, collate, pad_sources
from regard.data.vocabulary import BOS, EOS, PAD, UNK
from regard.errors import ConfigError, RunError
from regard.evaluation.fit import fit
from regard.formats.huggingface_import import DEAD, import_run
from regard.inference.load import load
from regard.training.prepare import resume_run, start_run

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
    assert config.model.add_bos == (make is llama)
    predictor = load(tmp_path / "run")
    end = made.config.eos_token_id
    end = end[0] if isinstance(end, list) else end
    places = moved(range(made.config.vocab_size), {end: EOS})
    for text in TEXTS:
        ours, other = theirs_of(predictor, made, tokenizer, text)
        with torch.no_grad():
            wanted = made(torch.tensor([other]), output_hidden_states=True)
            batch = Batch(torch.empty(1, 0), torch.zeros(1), torch.tensor([ours]), torch.tensor([ours]))
            found = predictor.model.logits(batch).log_softmax(-1)
            mask = torch.ones(len(ours), len(ours), dtype=torch.bool).tril()
            inside = layers(predictor.model.decoder, predictor.model.source_embedding(batch.target), mask=mask)
        assert_close(found[..., places], wanted.logits.log_softmax(-1), atol=2e-5, rtol=1e-5)
        for one, two in zip(inside[:-1], wanted.hidden_states[:-1], strict=True):  # their last is normed
            assert_close(one, two, atol=2e-5, rtol=1e-5)
        assert found[..., [PAD, UNK, BOS, end + 4]].max() < DEAD / 2


def test_a_pad_that_is_an_ordinary_word(tmp_path):
    """Some configurations name any entry: it stays a word that can be written."""
    _, tokenizer = gpt2(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    word = tokenizer.encode("d").ids[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": word}))
    import_run(tmp_path / "theirs", tmp_path / "run")
    bias = load(tmp_path / "run").model.output.bias
    assert bias[word + 4] > DEAD / 2 > bias[PAD]


@pytest.mark.parametrize("make", DECODERS)
def test_decoders_go_on_alike(tmp_path, make):
    made, tokenizer = make(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "run")
    predictor, own = (load(tmp_path / "run", ["decode.max_extra=64"], engine=one) for one in ("auto", "torch"))
    for text in TEXTS:
        _, other = theirs_of(predictor, made, tokenizer, text)
        end = made.config.eos_token_id
        end = end[0] if isinstance(end, list) else end
        wanted = made.generate(
            torch.tensor([other]), attention_mask=torch.ones(1, len(other)), max_new_tokens=64, do_sample=False,
            pad_token_id=0, eos_token_id=end,
        )[0, len(other) :].tolist()  # fmt: skip
        wanted = wanted[: wanted.index(end)] if end in wanted else wanted
        for one in (predictor, own):
            assert [token.id - 4 for token in one.predict([text])[0][0].tokens[:-1]] == wanted, text


def test_marian_is_the_same(tmp_path):
    made, tokenizer = marian(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "run")
    changes = ["decode.beam_size=1", "decode.max_ratio=0", "decode.max_extra=64"]
    predictor, own = (load(tmp_path / "run", changes, engine=one) for one in ("auto", "torch"))
    pad = made.config.pad_token_id
    places = moved(range(made.config.vocab_size), {0: EOS, 1: UNK, pad: PAD})
    for text in [text.replace("<eos>", "<end>") for text in TEXTS]:  # a unigram that finds <eos> makes it <unk>
        ours, other = theirs_of(predictor, made, tokenizer, text)
        assert moved(other, {0: EOS, 1: UNK}).tolist() == ours
        source, lengths = pad_sources([ours])
        answer = [BOS, 11, 12, 13, 14, 15, 16, 17]
        with torch.no_grad():
            wanted = made(torch.tensor([other]), decoder_input_ids=torch.tensor([[pad, *(i - 4 for i in answer[1:])]]))
            found = predictor.model.logits(Batch(source, lengths, torch.tensor([answer]), torch.tensor([answer])))
        assert_close(found.log_softmax(-1)[..., places], wanted.logits.log_softmax(-1), atol=2e-5, rtol=1e-5)
        wanted = made.generate(
            torch.tensor([other]), attention_mask=torch.ones(1, len(other)), max_new_tokens=64, do_sample=False,
            num_beams=1, bad_words_ids=[[pad]], forced_eos_token_id=None,
        )[0, 1:].tolist()  # fmt: skip
        wanted = wanted[: wanted.index(0)] if 0 in wanted else wanted
        for one in (predictor, own):
            tokens = [token.id for token in one.predict([text])[0][0].tokens[:-1]]
            assert tokens == moved(wanted, {1: UNK}).tolist()


# --- on the command line, and as the beginning of other runs ---------------------------------------------------------


def regard(*arguments):
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.stdout


def test_the_verbs(tmp_path):
    there = tmp_path / "theirs"
    gpt2(there)
    assert "run is a run of kind language model now (imported: gpt2, from" in regard("import", there, tmp_path / "run")
    found = regard("export", tmp_path / "run", tmp_path / "out", "--to", "huggingface")
    assert found.startswith("written:")
    assert found.rstrip().endswith("(GPT2LMHeadModel)")
    with pytest.raises(ConfigError, match="--to is 'elsewhere', expected huggingface or ctranslate2"):
        regard("export", tmp_path / "run", tmp_path / "other", "--to", "elsewhere")
    with pytest.raises(ConfigError, match="--quantization is 'int8', which only --to ctranslate2 knows"):
        regard("export", tmp_path / "run", tmp_path / "other", "--quantization", "int8")


def trec(tmp_path, *changes):
    rows = [f"{'AB'[n % 2]} {'who is' if n % 2 else 'what was'} the {n}" for n in range(40)]
    (tmp_path / "data.txt").write_text("".join(f"{row}\n" for row in rows))
    raw = f'text.raw=["{tmp_path}/nobody-needs-this"]'  # the encoder brings its words with it
    given = [raw, f'data.train=["{tmp_path}/data.txt"]', "data.cut_valid=4", "data.cut_test=4", "train.steps=4"]
    given += [
        "train.validate_every=2",
        "train.warmup=2",
        f"model.pretrained={tmp_path}/encoder",
        "train.average_checkpoints=1",
    ]
    return read("trec", [*given, *changes])


def test_an_encoder_begins_another_run(tmp_path):
    bert(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "encoder")
    begun = start_run(trec(tmp_path), tmp_path / "run")
    model = begun.config.model
    own = trec(tmp_path).model.dropout  # the form is the encoder's, how it learns is the recipe's
    assert (model.kind, model.size, model.layers, model.norm, model.dropout) == ("classifier", 24, 3, "post", own)
    assert model.ensemble_size == 1
    assert begun.config.text.max_length == 62  # the recipe's 64 are more than the encoder has
    first = begun.model
    before = load(tmp_path / "encoder").model
    assert_close(first.source_embedding.weight, before.source_embedding.weight)
    assert_close(first.encoder.state_dict(), before.encoder.state_dict())
    fit(begun, tmp_path / "run", lambda event: None, device="cpu", stop=lambda: True)
    shutil.rmtree(tmp_path / "encoder")  # no longer needed
    again = resume_run(tmp_path / "run")
    assert again.config == begun.config
    assert again.task.source.dump() == begun.task.source.dump()
    assert fit(again, tmp_path / "run", lambda event: None, device="cpu").step == 4
    assert load(tmp_path / "run")("who is the 7") in ("A", "B")


def test_a_shorter_run_takes_the_first_positions(tmp_path):
    bert(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "encoder")
    model = start_run(trec(tmp_path, "text.max_length=9"), tmp_path / "run").model
    table = load(tmp_path / "encoder").model.encoder.positions.table
    assert_close(model.encoder.positions.table, table[:11])


def test_what_cannot_begin_another_run(tmp_path, tiny_run):
    with pytest.raises(ConfigError, match=r"model.pretrained is a run of kind rnn, expected encoder"):
        start_run(trec(tmp_path, f"model.pretrained={tiny_run}"), tmp_path / "run")
    with pytest.raises(RunError, match="nothing is not a run: it does not exist"):
        start_run(trec(tmp_path, f"model.pretrained={tmp_path}/nothing"), tmp_path / "run")


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
    begun = start_run(read("squad-form", [*given, "text.max_length=500"]), tmp_path / "run")
    assert begun.config.text.max_length == 61
    model = begun.model
    batch = collate(begun.rows)
    assert batch.source.shape[1] == len(model.encoder.positions.table) == 64
    assert model(batch).total.isfinite()
