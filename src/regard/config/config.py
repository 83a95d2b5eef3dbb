"""What can be set: frozen models, saved whole with every run.

A default is written once, on its field; the string below a field is its documentation. Alternatives are unions chosen
by `kind`. Everything is checked before any tensor exists.
"""

import itertools
from typing import Annotated, Literal

from pydantic import Field, model_validator

from regard.config.data import Data
from regard.config.settings import Count, Paths, Settings, Share

# --- text ------------------------------------------------------------------------------------------------------------


class Tokenization(Settings):
    """How the text of one side becomes tokens."""

    kind: Literal["char", "byte", "word", "bpe", "unigram", "label"] = "bpe"
    """label: the whole text is one entry (a class), or several with a `separator`."""
    size: Count = 8000
    """Entries of the vocabulary, for bpe and unigram."""
    min_count: Count = 1
    """Words or characters seen less often in training become <unk>."""
    normalize: Literal["none", "nfc", "nfkc"] = "nfc"
    """Unicode normalization."""
    jamo: bool = False
    """Decompose Korean syllables (and other composed letters) into their parts; put together again in the output."""
    lowercase: bool = False
    """Whether capitals are read as small letters."""
    separator: str = ""
    """Between several labels of one text, for label."""


class TextConfig(Settings):
    """Both sides; without `target`, one vocabulary serves both."""

    source: Tokenization = Tokenization()
    """How the source becomes tokens, as below."""
    target: Tokenization | None = None
    """How the target does."""
    raw: Paths = ()
    """Files of plain text in the source's language, without targets. The vocabulary is learned from them too, and the
    source embedding begins so that entries with like neighbours there are alike; `model.freeze_vectors` keeps it."""
    languages: tuple[str, str] = ("source", "target")
    """Codes of the two sides' languages (ISO 639), by which the server offers them."""
    max_length: Count = 256
    """The most tokens a side may have."""
    longer: Literal["drop", "cut", "error"] = "drop"
    """What happens to a longer training example; each is counted. A longer text to predict is cut for `cut`, else an
    error."""


# --- models ----------------------------------------------------------------------------------------------------------


class EmbeddedConfig(Settings):
    """What every sequence-to-sequence model shares."""

    dropout: Share = 0.1
    """The share of numbers that training blanks, drawn anew every time."""
    tied: bool = True
    """The output layer is the target embedding; with one vocabulary the source embedding is that one too."""
    source_vectors: str | None = None
    """A text file of word vectors (as word2vec, GloVe and fastText ship them) for the source embedding."""
    target_vectors: str | None = None
    """The same for the target."""
    freeze_vectors: bool = False
    """Keep an embedding that was loaded, or counted from text.raw, as it is, the random vectors among it too."""


class RNNConfig(EmbeddedConfig):
    """Recurrent encoder and decoder (A1), with attention (A2) unless that is "none"."""

    kind: Literal["rnn"]
    cell: Literal["rnn", "gru", "lstm"] = "gru"
    """How a state becomes the next."""
    size: Count = 256
    """Of the states; a bidirectional encoder gives half of it to each direction."""
    embedding: Count = 256
    """Numbers of a token's vector."""
    layers: Count = 1
    """On top of each other."""
    bidirectional: bool = True
    """Whether the encoder reads from both ends."""
    attention: Literal["none", "dot", "scaled dot", "general", "additive"] = "additive"
    """How the decoder's state is compared with the encoder's."""

    @model_validator(mode="after")
    def directions_divide_size(self) -> "RNNConfig":
        if self.bidirectional and self.size % 2:
            raise ValueError(f"size {self.size} is odd, and a bidirectional encoder gives half to each direction")
        return self


class BlockConfig(Settings):
    """What every Transformer shares."""

    size: Count = 512
    """Numbers of a token's vector."""
    feedforward: Count = 2048
    """Numbers between the two maps of the feed-forward part."""
    heads: Count = 8
    """Attentions side by side in a layer; they share the size among them."""
    key_heads: Count | None = None
    """Heads of keys and values, each shared by as many heads of queries; None: as many as `heads`."""
    norm: Literal["pre", "post"] = "pre"
    """Whether norms stand before the parts of a block or behind the sums."""
    norm_kind: Literal["layer", "rms"] = "layer"
    """By mean and variance, or by the root of the mean square alone."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """What a norm adds to the variance."""
    activation: Literal["relu", "gelu", "gelu tanh", "silu"] = "relu"
    """Of the feed-forward part."""
    gated: bool = False
    """Whether the activation of one widened input multiplies another (Shazeer 2020)."""
    positions: Literal["sinusoidal", "learned", "rotary", "linear", "none"] = "sinusoidal"
    """How tokens know their order: sines or learned vectors that are added, turned queries and keys, or a bias by
    distance."""
    rotary_base: Annotated[float, Field(gt=0)] = 10_000.0
    """Of the slowest turn."""
    bias: bool = True
    """Whether the linear maps of blocks have a bias, and that of a language model's output is learned."""
    embedding_scale: bool = True
    """Whether embeddings are multiplied by the root of the size."""
    embedding_norm: bool = False
    """Whether embeddings, with their positions, are normed."""
    dropout: Share = 0.1
    """The share of numbers that training blanks, drawn anew every time."""

    @model_validator(mode="after")
    def heads_divide_size(self) -> "BlockConfig":
        if self.size % self.heads:
            raise ValueError(f"size {self.size} is not a multiple of heads {self.heads}")
        if self.key_heads and self.heads % self.key_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of key_heads {self.key_heads}")
        if self.positions == "rotary" and self.size // self.heads % 2:
            raise ValueError(f"rotary positions turn pairs: size / heads = {self.size // self.heads} must be even")
        return self


class TransformerConfig(BlockConfig, EmbeddedConfig):
    """Encoder-decoder Transformer (D4)."""

    kind: Literal["transformer"]
    encoder_layers: Count = 6
    """Blocks that read."""
    decoder_layers: Count = 6
    """Blocks that write."""
    copy_source: bool = False
    """Whether the output may copy tokens of the source: a learned share of every step's probability is that step's
    attention to the source (See 2017). Needs one vocabulary for both sides."""


class LanguageConfig(BlockConfig):
    """Decoder alone (D3): continues texts."""

    kind: Literal["language"]
    layers: Count = 6
    """Blocks."""
    tied: bool = True
    """Whether the output layer is the embedding."""
    begin: bool = True
    """Whether every document begins with <bos>; False: a prompt may come from anywhere in a text."""
    source_vectors: str | None = None
    """A text file of word vectors for the embedding."""
    freeze_vectors: bool = False
    """Whether they stay as they are."""


class EncoderConfig(BlockConfig):
    """Encoder alone (D2): gives every token, and the whole text, a vector."""

    kind: Literal["encoder"]
    layers: Count = 6
    """Blocks."""
    source_vectors: str | None = None
    """A text file of word vectors for the embedding."""
    freeze_vectors: bool = False
    """Whether they stay as they are."""
    window: Annotated[int, Field(ge=0)] = 0
    """Neighbours on either side that every token is mixed with before the blocks, by a convolution; 0: none (A5)."""
    token_dropout: Share = 0.0
    """The share of tokens that training hides behind <unk>, drawn anew every time."""
    pretrained: str | None = None
    """A run (of kind encoder, as `regard import` makes) whose vocabulary, form and weights this encoder begins with."""


class ClassifierConfig(EncoderConfig):
    """Encoder and classes (E3)."""

    kind: Literal["classifier"]  # type: ignore[assignment]
    pool: Literal["classes", "mean", "cls"] = "classes"
    """classes: every class looks at the text with a query of its own; mean: of all tokens; cls: the first token."""
    multiple: bool = False
    """Whether a text may have several labels, or none."""
    members: Count = 1
    """Models that learn side by side, from different first weights, and vote: the answer is the mean of their
    probabilities (Lakshminarayanan 2017). A model that begins with a `pretrained` run has one member."""


class ReaderConfig(EncoderConfig):
    """Encoder of question and context; the question looks at the context (E4)."""

    kind: Literal["reader"]  # type: ignore[assignment]
    answer: Literal["word", "span"] = "span"
    """span: a part of the context; word: an entry of the target vocabulary."""
    longest: Count = 30
    """Tokens of a span at most; examples with longer ones are dropped, and counted."""
    unit: Literal["token", "sentence"] = "token"
    """What the encoder's blocks see of the context: tokens, or whole sentences, each one vector."""
    shared: bool = False
    """Whether all layers are one block with the same weights (Dehghani 2019)."""

    @model_validator(mode="after")
    def spans_are_tokens(self) -> "ReaderConfig":
        if self.answer == "span" and self.unit == "sentence":
            raise ValueError('an answer that is a span needs unit = "token"')
        return self


Model = Annotated[
    RNNConfig | TransformerConfig | LanguageConfig | EncoderConfig | ClassifierConfig | ReaderConfig,
    Field(discriminator="kind"),
]

# --- learning and using ----------------------------------------------------------------------------------------------


class TrainConfig(Settings):
    """How the weights are learned."""

    steps: Count = 10_000
    """Updates in all."""
    batch_tokens: Count = 4096
    """Padded tokens of a batch: rows times the longer side's longest row."""
    accumulate: Count = 1
    """Batches per update."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """adamw takes the decay off the weights themselves, not through their gradients."""
    rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    schedule: Literal["inverse sqrt", "cosine", "constant"] = "inverse sqrt"
    """How the rate falls after its peak."""
    warmup: Annotated[int, Field(ge=0)] = 400
    """Updates over which the rate grows from zero to its peak."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """Of Adam: how long gradients and their squares are remembered."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """How strongly weights are drawn to zero."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient; inf does not clip."""
    smoothing: Share = 0.1
    """Label smoothing."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 products where a measurement says that this machine multiplies it faster."""
    average: Count = 1
    """Checkpoints whose weights are averaged into the model that is validated and kept."""
    validate_every: Count = 500
    """Updates between validations; each makes a checkpoint."""
    validate_examples: Count = 1000
    """At most this many validation examples are decoded."""
    save_every: Count | None = None
    """Updates between saves of the resumable state, beside those at validations."""
    patience: Count | None = None
    """Validations without a better score before training stops early."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Of the first weights, the order of batches, dropout and generated data."""


class DecodeConfig(Settings):
    """How outputs are searched."""

    beam: Count = 4
    """Hypotheses kept; 1 is greedy."""
    length_penalty: Annotated[float, Field(ge=0, le=10)] = 0.6
    """Alpha of ((5 + length) / 6) ** alpha, by which a log-probability is divided."""
    max_ratio: Annotated[float, Field(ge=0, le=1000)] = 1.5
    """An output has at most max_ratio times the source's tokens + max_extra."""
    max_extra: Annotated[int, Field(ge=1, le=10**6)] = 20
    """See `max_ratio`."""
    no_repeat: Annotated[int, Field(ge=0, le=10**6)] = 0
    """No n-gram of this size comes twice; 0 allows all."""
    sample: bool = False
    """Draw tokens instead of searching for the best."""
    temperature: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] = 1.0
    """When drawing: below 1 the likely become likelier."""
    top_k: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """When drawing: only from so many of the likeliest tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """When drawing: only from the likeliest tokens that together have this probability."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """When drawing: the same seed gives the same answers."""
    min_length: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Tokens that an output has at least, as far as the limit above allows."""
    slide: bool = False
    """Whether a language model goes on past the length it was trained for, forgetting the oldest tokens (rotary and
    linear positions)."""


Metric = Literal[
    "bleu", "chrf", "ter", "exact", "accuracy", "wer", "per", "perplexity",  # of outputs
    "nats", "bpb",  # of a language model: a token, and bits a byte
    "f1", "ece",  # of labels: macro F1, expected calibration error
    "rouge1", "rouge2", "rougel",  # of summaries
    "span_exact", "span_f1",  # of spans, by SQuAD's rules
]  # fmt: skip


class EvaluateConfig(Settings):
    """What is measured; the first metric decides which checkpoint is best."""

    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] = ("bleu", "chrf", "exact", "perplexity")
    """Several, by name (docs/tasks.md says which fit which task)."""
    group: bool = False
    """Whether several targets of one source are all right answers to it (pronunciations), not examples of their own."""
    buckets: tuple[Count, ...] = (5, 10, 15, 20, 30, 50)
    """Upper bounds, in source tokens, of the length buckets, each above the one before."""

    @model_validator(mode="after")
    def buckets_increase(self) -> "EvaluateConfig":
        if any(low >= high for low, high in itertools.pairwise(self.buckets)):
            raise ValueError(f"buckets {list(self.buckets)} must increase, as [5, 10, 20]")
        return self


class Config(Settings):
    """Everything that makes a run."""

    about: str = ""
    time: str = ""
    """About how long training takes."""
    data: Data
    text: TextConfig = TextConfig()
    model: Model
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def target_fits_model(self) -> "Config":
        words = isinstance(self.model, ReaderConfig) and self.model.answer == "word"
        chooses = words or isinstance(self.model, ClassifierConfig)
        labels = self.text.target is not None and self.text.target.kind == "label"
        if chooses != labels:
            wanted = 'needs text.target = { kind = "label" }' if chooses else "has no labels: change text.target"
            raise ValueError(f"a model of kind {self.model.kind} {wanted}")
        several, separator = getattr(self.model, "multiple", False), self.text.target and self.text.target.separator
        if several and not separator:
            raise ValueError('model.multiple needs what stands between two labels: text.target.separator = ","')
        if separator and not several:
            raise ValueError("text.target.separator is for classifiers of several labels: set model.multiple = true")
        if self.text.target is not None and getattr(self.model, "copy_source", False):
            raise ValueError("model.copy_source needs one vocabulary for both sides: leave text.target out")
        return self
