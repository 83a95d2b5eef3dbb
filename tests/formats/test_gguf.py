"""GGUF files give the numbers of the model they were made of."""

import pytest
from foreign import TEXTS, gguf_of, logits_of_language
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


def test_gguf_whose_entries_are_damaged(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_of(tmp_path / "theirs", path)
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.nerges"))
    with pytest.raises(DataError, match=r"model.gguf is damaged, cut short, or no GGUF file: KeyError"):
        import_run(path, tmp_path / "run")
