"""GGUF files give the numbers of the model they were made of."""

import pytest
from foreign import TEXTS, gguf_of, logits_of_language
from torch.testing import assert_close

from regard.errors import DataError
from regard.exchange import import_run
from regard.predict import load
from regard.quantised import settings as gguf_settings


def test_gguf_is_the_same(tmp_path):
    (tmp_path / "file").mkdir()
    gguf_of(tmp_path / "theirs", tmp_path / "file" / "model.gguf")
    import_run(tmp_path / "theirs", tmp_path / "one")
    config = import_run(tmp_path / "file", tmp_path / "two")
    assert config.model.begin
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    for text in TEXTS:
        assert one.encode(text).ids == two.encode(text).ids
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
    gguf_of(tmp_path / "theirs", path, pre="tekken")
    with pytest.raises(DataError, match="tokenizer is 'gpt2', 'tekken'; known is 'gpt2' with one of: gpt-2, smollm"):
        import_run(path, tmp_path / "run")
    with pytest.raises(DataError, match=r"the architecture 'mamba' is not known in GGUF files. Known: llama"):
        gguf_settings(path, {"general.architecture": "mamba"})
    with pytest.raises(DataError, match=r"does not say llama.attention.head_count"):
        gguf_settings(path, {"general.architecture": "llama"})
