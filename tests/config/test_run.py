"""The settings of a run: which kinds of models there are, and what they say about the rest."""

from typing import Literal

import pytest

from regard.config import toml
from regard.config.model import LanguageModelConfig, ModelConfig
from regard.config.run import MODELS, Config, register_models
from regard.config.settings import Count
from regard.errors import ConfigError

TEXT = '[data]\nkind = "reverse"\n[model]\nkind = "toy"\nwidth = 7\n'


class ToyConfig(ModelConfig):
    """A kind that is not of this package."""

    kind: Literal["toy", "toy too"]
    width: Count = 3
    """How wide."""

    def check(self, config):
        if (config.train.steps or self.width) < self.width:
            raise ValueError("model.width is more than train.steps")


@pytest.fixture
def toy():
    """The kinds of models with two more of them, until the test is done."""
    before = dict(MODELS)
    register_models(ToyConfig)
    yield
    MODELS.clear()
    MODELS.update(before)
    register_models()


@pytest.fixture
def read(tmp_path):
    """Reads settings given as text."""

    def reading(text, *changes):
        (tmp_path / "given.toml").write_text(text, encoding="utf-8")
        return toml.read(str(tmp_path / "given.toml"), changes)

    return reading


def test_a_kind_that_was_registered_is_accepted(read, toy):
    assert MODELS["toy"] is MODELS["toy too"] is ToyConfig
    found = read(TEXT)
    assert found.model == ToyConfig(kind="toy", width=7)
    assert read(toml.dump(found)) == found
    assert toml.change(found, ["model.kind=toy too", "model.width=2"]).model == ToyConfig(kind="toy too", width=2)
    direct = Config.model_validate({"data": {"kind": "reverse"}, "model": {"kind": "toy"}})
    assert direct.model.width == 3
    assert Config(data=direct.data, model=ToyConfig(kind="toy")) == direct


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.widht=3", "unknown setting model.widht. Did you mean model.width?"),
        ("model.width=0", "setting model.width is 0: input should be greater than or equal to 1."),
        ("train.steps=6", "model.width is more than train.steps."),
        (
            "model.kind=tyo",
            "'reader', 'tagger', 'lineup', 'captioner', 'image classifier', 'toy', 'toy too'.",
        ),
    ],
)
def test_what_is_wrong_with_a_kind_that_was_registered_is_said(read, toy, change, message):
    with pytest.raises(ConfigError) as caught:
        read(TEXT, change)
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize("name", toml.recipes())
def test_the_kinds_of_recipes_stay(name, toy):
    found = toml.parse(toml.recipes()[name]).model
    assert type(found) is MODELS[found.kind]
    assert type(found) is not ToyConfig


def test_a_kind_that_was_not_registered_is_refused(read):
    assert "toy" not in MODELS
    with pytest.raises(
        ConfigError,
        match=r"model\.kind is 'toy', expected one of .*'lineup', 'captioner', 'image classifier'\.$",
    ):
        read(TEXT)


def test_what_a_pattern_cannot_do_is_said():
    """Blocks that are filled up, and random blocks that are not there."""

    def doubts(longest, **own):
        return LanguageModelConfig(kind="language model", size=8, heads=2, **own).find_doubts(longest)

    assert doubts(1000) == doubts(1000, attention="bigbird", block=50, random_blocks=16) == []
    padded = "the longest text has 1,000 tokens, no multiple of model.{}: it is padded to 1,024, and nobody sees the "
    padded += "padding."
    assert doubts(1000, attention="bigbird", block=64) == [padded.format("block 64")]
    assert doubts(1000, attention="window", window_size=128) == [padded.format("window_size 128")]
    few = "but a block of the longest text has 16 others beside those near it and the global ones: it sees the whole "
    few += "text."
    assert doubts(1000, attention="bigbird", block=50, random_blocks=17) == [f"model.random_blocks is 17, {few}"]
    assert "has 0 others" in doubts(100, attention="bigbird", block=50)[0]
