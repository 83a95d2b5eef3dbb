"""Models whose answer is a structure: taggings and line-ups."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from regard.config.model import BlockConfig, ModelConfig
from regard.config.settings import Count, Share

if TYPE_CHECKING:
    from regard.config.run import Config


class LineupConfig(ModelConfig):
    """The line-up game: every position looks at all players, by their numbers."""

    kind: Literal["lineup"]
    skills: Count = 4
    """Numbers of every player and position."""
    embedding: Count = 16
    """Size of the embedding of a number."""
    size: Count = 32
    """Size of what players and positions are compared by."""
    score: Literal["cosine", "scaled dot"] = "cosine"
    """How well a player fits a position; the cosine has a learned temperature."""
    normalize: Literal["softmax", "matching"] = "matching"
    """softmax: every position chooses for itself; matching: no player can stand at two positions."""


WINDOW = (
    *(f"word[{place}]" for place in range(-2, 3)), "word[-1]|word[0]", "word[0]|word[1]",
    *("prefix3[0]", "suffix3[0]", "shape[0]"),
)  # fmt: skip
"""The words around a word, its ends and its shape: templates that do well on most taggings."""


class TaggerConfig(BlockConfig):
    """A tag for every word: a chain over features, or over an encoder's states."""

    kind: Literal["tagger"]
    structure: Literal["crf", "memm", "hmm", "softmax"] = "crf"
    """How tags depend on each other: CRF (one normalizer for the whole sentence), MEMM (one for every step), HMM
    (counted), or not at all (softmax)."""
    encoder: Literal["none", "rnn", "transformer"] = "none"
    """What reads the features of the words: nothing (their weights are the scores, fitted by L-BFGS in `train.steps`
    passes), a bidirectional LSTM, or a Transformer."""
    pretrained: str | None = None
    """A run (of kind encoder, as `regard import` makes) whose vocabulary, form and weights a Transformer begins with:
    it reads sub-words instead of features, and `text.max_length` counts them."""
    features: tuple[str, ...] = WINDOW
    """Feature templates (docs/tagging.md): properties of a word and its neighbours, as suffix3[0] or pos[-1]|pos[0].
    With `pretrained`, there are none: leave them out, or set []."""
    max_features: Count = 64
    """Features of one word at most."""
    constraints: Literal["none", "spans"] = "none"
    """spans: tags are BIO or BIOES, and only what is valid there may follow (I-NP only B-NP or I-NP)."""
    l1: Annotated[float, Field(ge=0)] = 0.0
    """L1 penalty of weights that L-BFGS fits (it is OWL-QN then)."""
    l2: Annotated[float, Field(ge=0)] = 1.0
    """L2 penalty (the sum of squares, times this) of weights that L-BFGS fits."""
    smoothing: Annotated[float, Field(gt=0)] = 0.1
    """Of an HMM: what is added to every count."""
    word_dropout: Share = 0.0
    """Probability with which training hides a feature, or a sub-word, from an encoder."""
    size: Count = 256
    feedforward: Count = 512
    heads: Count = 4
    layers: Count = 1
    """Layers of the LSTM, or blocks of the Transformer."""

    @model_validator(mode="after")
    def structure_fits_encoder(self) -> "TaggerConfig":
        if self.structure == "hmm" and self.encoder != "none":
            raise ValueError('an HMM is counted: it needs encoder = "none"')
        if self.structure == "hmm" and (len(self.features) != 1 or self.features[0].startswith("ngrams")):
            raise ValueError('an HMM emits one thing a word: it needs one template, as features = ["rare[0]"]')
        if self.encoder == "rnn" and self.size % 2:
            raise ValueError(f"size {self.size} is odd, and a bidirectional LSTM gives half to each direction")
        return self

    @model_validator(mode="after")
    def words_are_features_or_subwords(self) -> "TaggerConfig":
        if self.pretrained and self.encoder != "transformer":
            raise ValueError('a pretrained encoder is a Transformer: set encoder = "transformer"')
        if self.pretrained and self.features not in ((), WINDOW):
            raise ValueError("a pretrained encoder reads sub-words, no features: leave features out, or set [] for it")
        if not self.pretrained and not self.features:
            raise ValueError("features are all that is known of a word: name one template at least")
        return self

    def check(self, config: "Config") -> None:
        self.check_slots(config)
        target = config.text.target
        if target is None or target.kind != "label" or target.separator != " ":
            raise ValueError('a model of kind tagger needs text.target = { kind = "label", separator = " " }')
