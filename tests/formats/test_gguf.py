"""GGUF files give the numbers of the model they were made of."""

import json
import struct
import tracemalloc

import pytest
from foreign import TEXTS, gguf_of, logits_of_language
from tokenizers import Tokenizer
from torch.testing import assert_close

from regard.errors import DataError
from regard.formats.gguf import settings as gguf_settings
from regard.formats.gguf import tokenizer as gguf_tokenizer
from regard.formats.huggingface_import import import_run
from regard.inference.load import load


def test_gguf_is_the_same(tmp_path):
    (tmp_path / "file").mkdir()
    gguf_of(tmp_path / "theirs", tmp_path / "file" / "model.gguf")
    import_run(tmp_path / "theirs", tmp_path / "one")
    config = import_run(tmp_path / "file", tmp_path / "two")
    assert config.model.add_bos
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    for text in TEXTS:
        assert one.encode([text])[0].ids == two.encode([text])[0].ids
        assert_close(logits_of_language(one, text), logits_of_language(two, text), atol=1e-5, rtol=1e-5)
        assert one(text) == two(text)


@pytest.mark.parametrize("share", [0, 0.001, 0.05, 0.3, 0.7, 0.999])
def test_gguf_that_is_cut_short_says_so(tmp_path, share):
    path = tmp_path / "model.gguf"
    gguf_of(tmp_path / "theirs", path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError, match=r"model.gguf is damaged, cut short, or no GGUF file"):
        import_run(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def text(words):
    """A text as the format has it: its length, and its bytes."""
    return struct.pack("<Q", len(words)) + words


def a_gguf(facts=b"", tensors=b"", count=(0, 0)):
    """The bytes of a file with so many tensors and facts, whatever they are."""
    return b"GGUF" + struct.pack("<IQQ", 3, *count) + facts + tensors


ENDLESS = {
    "array": (
        a_gguf(text(b"a") + struct.pack("<IIQ", 9, 0, 2**60), count=(0, 1)),
        "arrays have 1,152,921,504,606,846,976",
    ),
    "strings": (a_gguf(text(b"a") + struct.pack("<IIQ", 9, 8, 2**40), count=(0, 1)), "arrays have 1,099,511,627,776"),
    "numbers": (
        a_gguf(text(b"a") + struct.pack("<IIQ", 9, 6, 2**20), count=(0, 1)),
        "a part of 4,194,304 bytes is longer",
    ),
    "arrays": (
        a_gguf(text(b"a") + struct.pack("<IIQ", 9, 9, 3) + 3 * struct.pack("<IQ", 0, 2**21), count=(0, 1)),
        "a part of 2,097,152 bytes is longer",
    ),
    "string": (a_gguf(struct.pack("<Q", 2**62), count=(0, 1)), "a part of 4,611,686,018,427,387,904 bytes is longer"),
    "facts": (a_gguf(count=(0, 2**60)), "it ends too early"),
    "tensors": (a_gguf(count=(2**60, 0)), "it ends too early"),
    "size": (
        a_gguf(tensors=text(b"a") + struct.pack("<IQQIQ", 2, 2**32, 2**32, 0, 0), count=(1, 0)),
        "its tensors would take 73,786,976,294,838,206,464 bytes, the file has 65",
    ),
    "overlap": (
        a_gguf(
            tensors=b"".join(text(b"%04d" % n) + struct.pack("<IQIQ", 1, 9000, 0, 0) for n in range(1000)),
            count=(1000, 0),
        )
        + bytes(36_032),
        "its tensors would take 36,000,000 bytes, the file has 72,056",
    ),
    "dimensions": (
        a_gguf(tensors=text(b"a") + struct.pack("<I", 2**31), count=(1, 0)),
        "2,147,483,648 dimensions, at most 4",
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_a_file_does_not_hold_takes_no_memory(tmp_path, what):
    """Refused before anything is made of it, so the library is never asked."""
    data, message = ENDLESS[what]
    (tmp_path / "model.gguf").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message):
            import_run(tmp_path / "model.gguf", tmp_path / "run")
        assert tracemalloc.get_traced_memory()[1] < 2**21 + 4 * len(data)
    finally:
        tracemalloc.stop()
    assert len(ENDLESS["array"][0]) == 49


def test_gguf_of_other_kinds(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_of(tmp_path / "theirs", path, lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"))
    with pytest.raises(DataError, match=r"rotary positions are scaled \(yarn\)"):
        import_run(path, tmp_path / "run")
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        gguf_of(tmp_path / "theirs", path, lambda writer, name=name: writer.add_float32(f"llama.{name}", 8.0))
        with pytest.raises(DataError, match=rf"rotary positions are scaled \({name} is 8.0\)"):
            import_run(path, tmp_path / "run")
    gguf_of(tmp_path / "theirs", path, lambda writer: writer.add_float32("llama.rope.scaling.factor", 1.0))
    import_run(path, tmp_path / "unscaled")
    gguf_of(tmp_path / "theirs", path, pre="tekken")
    with pytest.raises(DataError, match="tokenizer is 'gpt2', 'tekken'; known is 'gpt2' with one of: gpt-2, smollm"):
        import_run(path, tmp_path / "run")
    with pytest.raises(DataError, match=r"the architecture 'mamba' is not known in GGUF files. Known: llama"):
        gguf_settings(path, {"general.architecture": "mamba"})
    with pytest.raises(DataError, match=r"does not say llama.attention.head_count"):
        gguf_settings(path, {"general.architecture": "llama"})


@pytest.mark.parametrize("begin", [{}, {"tokenizer.ggml.bos_token_id": 2}, {"tokenizer.ggml.bos_token_id": -1}])
def test_gguf_that_begins_with_no_entry(tmp_path, begin):
    facts = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": [], "add_bos_token": True}
    with pytest.raises(DataError, match=r"add_bos_token is set, but bos_token_id is (None|2|-1), expected an entry"):
        gguf_tokenizer(tmp_path, {f"tokenizer.ggml.{name}": value for name, value in facts.items()} | begin)


def facts_of(**more):
    """What a file of three entries says of its tokenizer: a word, a control sign, and an entry of a user."""
    facts = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "<s>", "<tool>"], "merges": [], "bos_token_id": 1}
    return {f"tokenizer.ggml.{name}": value for name, value in (facts | {"token_type": [1, 3, 4]} | more).items()}


def test_only_control_signs_are_special(tmp_path):
    added = gguf_tokenizer(tmp_path, facts_of())["added_tokens"]
    assert {token["content"]: token["special"] for token in added} == {"<s>": True, "<tool>": False}


@pytest.mark.parametrize(
    ("pre", "said", "begins"),
    [("llama-bpe", {}, True), ("gpt-2", {}, False), ("llama-bpe", {"add_bos_token": False}, False),
     ("gpt-2", {"add_bos_token": True}, True)],
)  # fmt: skip
def test_what_begins_a_text_where_a_file_is_silent(tmp_path, pre, said, begins):
    """As llama.cpp has it: Llama 3 begins with <bos>, others do not."""
    tokenizer = Tokenizer.from_str(json.dumps(gguf_tokenizer(tmp_path, facts_of(pre=pre, **said))))
    assert tokenizer.encode("a").tokens == (["<s>", "a"] if begins else ["a"])


def test_gguf_whose_entries_are_damaged(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_of(tmp_path / "theirs", path)
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.nerges"))
    with pytest.raises(DataError, match=r"model.gguf is damaged, cut short, or no GGUF file: KeyError"):
        import_run(path, tmp_path / "run")
