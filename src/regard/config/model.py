"""What a model is made of: the settings of `[model]`, one class per kind.

Which kinds there are is a table; `regard.tasks.register` adds to it.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from regard.config.settings import Count, Settings, Share

if TYPE_CHECKING:
    from regard.config.run import Config


class ModelConfig(Settings):
    """What every kind of model has: a `kind`, by which it is chosen, and an opinion about the rest of the run."""

    kind: Any

    def check(self, config: "Config") -> None:
        """Raise a ValueError where the rest of a run's settings contradicts this model."""
        if config.text.target is not None and config.text.target.kind == "label":
            raise ValueError(f"a model of kind {self.kind} has no labels: change text.target")

    def find_doubts(self, longest: int) -> list[str]:
        """What to mention before training on texts of at most so many tokens."""
        return []


def check_labels(model: ModelConfig, config: "Config", *, separated: bool = False) -> None:
    """Raise a ValueError unless the targets of a model are labels; with `separated`, several in one text."""
    target = config.text.target
    if target is None or target.kind != "label":
        raise ValueError(f'a model of kind {model.kind} needs text.target = {{ kind = "label" }}')
    if separated and not target.separator:
        raise ValueError('model.multi_label needs what stands between two labels: text.target.separator = ","')
    if target.separator and not separated:
        raise ValueError("text.target.separator is for classifiers of several labels: set model.multi_label = true")


class Seq2SeqConfig(ModelConfig):
    """What every sequence-to-sequence model shares."""

    dropout: Share = 0.1
    """Dropout probability; on a CPU, the nearest multiple of 1/256 where that changes it by less than 2 %."""
    tie_embeddings: bool = True
    """Use the target embedding as the output layer; with one vocabulary, as the source embedding too."""
    source_vectors: str | None = None
    """A text file of word vectors (as word2vec, GloVe and fastText ship them) for the source embedding."""
    target_vectors: str | None = None
    """The same for the target."""
    freeze_vectors: bool = False
    """Do not train an embedding that was loaded, or counted from text.raw; its random rows stay as they are, too."""


WHOLE = ("projective trees", "nonprojective trees", "matching")
"""Values of `normalize` that are structures over all queries of a text, not of each by itself."""


class RNNConfig(Seq2SeqConfig):
    """Recurrent encoder and decoder, with attention unless that is "none"."""

    kind: Literal["rnn"]
    cell: Literal["rnn", "gru", "lstm"] = "gru"
    """The recurrent cell."""
    size: Count = 256
    """Size of the hidden states; a bidirectional encoder gives half of it to each direction."""
    embedding: Count = 256
    """Size of the token embeddings."""
    layers: Count = 1
    """Recurrent layers of the encoder, and of the decoder."""
    bidirectional: bool = True
    """Whether the encoder reads from both ends."""
    attention: Literal["none", "dot", "scaled dot", "cosine", "general", "additive"] = "additive"
    """The attention score: Bahdanau's is additive, Luong's are dot and general; cosine has a learned temperature."""
    normalize: Literal["softmax", "segments"] = "softmax"
    """How scores become weights: softmax, or segments (marginals of a two-state chain over the source, Kim 2017)."""
    encoder: Literal["recurrent", "words", "softmax", "projective trees", "nonprojective trees"] = "recurrent"
    """What the decoder sees of a word: a recurrent state; its embedding alone (words); or its embedding and those that
    it attends to among all words, by scores of recurrent states, with these weights (soft parents, Kim 2017)."""

    @model_validator(mode="before")
    @classmethod
    def one_query_at_a_time(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("normalize") in WHOLE:
            raise ValueError(
                f"normalize {given['normalize']!r} weighs all queries of a text together, and a decoder has one at a "
                'time; trees are for its encoder, as in encoder = "projective trees"'
            )
        return given

    @model_validator(mode="after")
    def segments_need_scores(self) -> "RNNConfig":
        if self.normalize != "softmax" and self.attention == "none":
            raise ValueError(f'normalize {self.normalize!r} needs scores, and attention is "none"')
        return self

    @model_validator(mode="after")
    def directions_divide_size(self) -> "RNNConfig":
        if self.bidirectional and self.size % 2:
            raise ValueError(f"size {self.size} is odd, and a bidirectional encoder gives half to each direction")
        return self


class BlockConfig(ModelConfig):
    """What every Transformer shares."""

    size: Count = 512
    """Model dimension (d_model)."""
    feedforward: Count = 2048
    """Inner size of the feed-forward layers (d_ff)."""
    heads: Count = 8
    """Attention heads; each has size / heads dimensions."""
    kv_heads: Count | None = None
    """Heads of keys and values (grouped-query attention); None: as many as `heads`."""
    norm: Literal["pre", "post"] = "pre"
    """Pre-norm or post-norm blocks."""
    norm_kind: Literal["layer", "rms"] = "layer"
    """LayerNorm or RMSNorm."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance in a norm."""
    activation: Literal["relu", "gelu", "gelu tanh", "silu"] = "relu"
    """Activation of the feed-forward layers."""
    gated: bool = False
    """Gated feed-forward layers (GLU, Shazeer 2020): with silu, SwiGLU."""
    positions: Literal["sinusoidal", "learned", "rotary", "alibi", "none"] = "sinusoidal"
    """How tokens know their order: position vectors that are added (sinusoidal, learned), rotated queries and keys
    (rotary, RoPE), or a bias linear in distance (ALiBi)."""
    rotary_base: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary frequencies (rope_theta)."""
    bias: bool = True
    """Whether the linear layers of blocks have a bias, and the output layer of a language model learns one."""
    attention: Literal["full", "window", "bigbird", "linformer"] = "full"
    """What a token sees of its own text: all of it; the tokens near it (window); blocks of tokens near it, global ones
    and random ones (BigBird, Zaheer 2020); or all of it in a few slots (Linformer, Wang 2020). See docs/long.md."""
    window_size: Count = 64
    """Of `attention` window: tokens on either side."""
    block: Count = 64
    """Of bigbird: tokens of a block."""
    near_blocks: Annotated[int, Field(ge=0)] = 1
    """Of bigbird: blocks on either side of a token's own."""
    global_blocks: Annotated[int, Field(ge=0)] = 1
    """Of bigbird: blocks at the beginning of a text that see everything, and that every token sees."""
    random_blocks: Annotated[int, Field(ge=0)] = 3
    """Of bigbird: other blocks that are drawn for each; a text that has no more of them shows all."""
    pattern_seed: Annotated[int, Field(ge=0)] = 0
    """Of bigbird: what the random blocks are drawn with; every layer has its own."""
    slots: Count = 256
    """Of linformer: keys and values that a text is projected to (k)."""
    share_slots: Literal["nothing", "heads", "keys and values", "layers"] = "heads"
    """Of linformer: what shares a projection; each also shares what the ones before it do."""
    normalize: Literal["softmax", "segments", "projective trees", "nonprojective trees", "matching"] = "softmax"
    """How scores become weights: softmax; segments (marginals of a two-state chain over the keys); of an encoder's
    self-attention, soft parents in trees, or a matching that gives every token its own (docs/structure.md)."""
    embedding_scale: bool = True
    """Multiply embeddings by the square root of the size."""
    embedding_norm: bool = False
    """Normalize embeddings after positions are added."""
    dropout: Share = 0.1
    """Dropout probability; on a CPU, the nearest multiple of 1/256 where that changes it by less than 2 %."""

    @model_validator(mode="after")
    def heads_divide_size(self) -> "BlockConfig":
        if self.size % self.heads:
            raise ValueError(f"size {self.size} is not a multiple of heads {self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.positions == "rotary" and self.size // self.heads % 2:
            raise ValueError(f"rotary positions rotate pairs: size / heads = {self.size // self.heads} must be even")
        return self

    @model_validator(mode="after")
    def attention_can_be_had(self) -> "BlockConfig":
        if self.attention != "full" and self.normalize != "softmax":
            raise ValueError(f"normalize {self.normalize!r} needs all scores of a text: attention must be full")
        if self.attention == "linformer" and self.positions in ("rotary", "alibi"):
            raise ValueError(
                f"{self.positions} positions compare tokens, and linformer's slots are none: choose others"
            )
        return self

    def check(self, config: "Config") -> None:
        super().check(config)
        self.check_slots(config)

    def find_doubts(self, longest: int) -> list[str]:
        """Where a text is no whole number of blocks, or has fewer than the pattern asks for."""
        if self.attention not in ("window", "bigbird"):
            return []
        name, block = ("block", self.block) if self.attention == "bigbird" else ("window_size", self.window_size)
        blocks, found = -(-longest // block), []
        if longest % block:
            filled = f"the longest text has {longest:,} tokens, no multiple of model.{name} {block:,}"
            found.append(f"{filled}: it is padded to {blocks * block:,}, and nobody sees the padding.")
        others = max(0, blocks - 1 - 2 * self.near_blocks - self.global_blocks)
        if self.attention == "bigbird" and self.random_blocks > others:
            there = f"a block of the longest text has {others:,} others beside those near it and the global ones"
            found.append(f"model.random_blocks is {self.random_blocks:,}, but {there}: it sees the whole text.")
        return found

    def check_slots(self, config: "Config") -> None:
        """Raise a ValueError where there would be more slots than tokens."""
        if self.attention == "linformer" and self.slots > config.text.max_length:
            raise ValueError(
                f"model.slots {self.slots:,} is more than the {config.text.max_length:,} tokens of text.max_length: "
                "lower it, or use full attention"
            )


class TransformerConfig(BlockConfig, Seq2SeqConfig):
    """Encoder-decoder Transformer."""

    kind: Literal["transformer"]
    encoder_layers: Count = 6
    """Blocks of the encoder."""
    decoder_layers: Count = 6
    """Blocks of the decoder."""
    pointer_generator: bool = False
    """Whether the output may copy tokens of the source: a learned share of every step's probability is that step's
    attention to the source (pointer-generator, See 2017). Needs one vocabulary for both sides."""

    def check(self, config: "Config") -> None:
        super().check(config)
        if self.pointer_generator and config.text.target is not None:
            raise ValueError("model.pointer_generator needs one vocabulary for both sides: leave text.target out")


class LanguageModelConfig(BlockConfig):
    """Decoder-only Transformer: continues texts."""

    kind: Literal["language model"]
    layers: Count = 6
    """Blocks."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer."""
    add_bos: bool = True
    """Whether every document begins with <bos>; False: a prompt may come from anywhere in a text."""
    source_vectors: str | None = None
    """A text file of word vectors for the embedding."""
    freeze_vectors: bool = False
    """Do not train an embedding that was loaded or counted."""

    @model_validator(mode="after")
    def no_token_sees_the_whole_text(self) -> "LanguageModelConfig":
        if self.attention == "linformer":
            raise ValueError(
                "linformer's slots hold all tokens of a text, also those ahead, and a language model sees only those "
                "that came before (it is causal): choose bigbird or window"
            )
        if self.normalize in WHOLE:
            raise ValueError(
                f"normalize {self.normalize!r} weighs all tokens of a text together, and a language model sees only "
                "those that came before (it is causal)"
            )
        return self


class EncoderConfig(BlockConfig):
    """Transformer encoder: gives every token, and the whole text, a vector."""

    kind: Literal["encoder"]
    layers: Count = 6
    """Blocks."""
    source_vectors: str | None = None
    """A text file of word vectors for the embedding."""
    freeze_vectors: bool = False
    """Do not train an embedding that was loaded or counted."""
    conv_window: Annotated[int, Field(ge=0)] = 0
    """Neighbours on either side that a convolution mixes into every token before the blocks; 0: no convolution."""
    word_dropout: Share = 0.0
    """Probability with which training replaces a token by <unk>."""
    pretrained: str | None = None
    """A run (of kind encoder, as `regard import` makes) whose vocabulary, form and weights this encoder begins with."""


class ClassifierConfig(EncoderConfig):
    """Encoder and classes."""

    kind: Literal["classifier"]  # type: ignore[assignment]
    pooling: Literal["classes", "mean", "cls"] = "classes"
    """classes: every class attends to the text with a learned query of its own; mean: over all tokens; cls: the first
    token."""
    multi_label: bool = False
    """Whether a text may have several labels, or none."""
    ensemble_size: Count = 1
    """Models that are trained side by side from different first weights; the answer is the mean of their probabilities
    (deep ensemble, Lakshminarayanan 2017). A model that begins with a `pretrained` run is alone."""

    def check(self, config: "Config") -> None:
        self.check_slots(config)
        check_labels(self, config, separated=self.multi_label)


class ReaderConfig(EncoderConfig):
    """Encoder of question and context for question answering; the question attends to the context."""

    kind: Literal["reader"]  # type: ignore[assignment]
    answer: Literal["word", "span"] = "span"
    """span: a part of the context; word: an entry of the target vocabulary."""
    max_answer_length: Count = 30
    """Tokens of a span at most; training examples with longer ones are dropped, and counted."""
    unit: Literal["token", "sentence"] = "token"
    """What the encoder's blocks see of the context: tokens, or whole sentences, each as one vector."""
    share_layers: bool = False
    """Whether all layers share the weights of one block (Universal Transformer, Dehghani 2019)."""

    @model_validator(mode="after")
    def spans_are_tokens(self) -> "ReaderConfig":
        if self.answer == "span" and self.unit == "sentence":
            raise ValueError('an answer that is a span needs unit = "token"')
        return self

    def check(self, config: "Config") -> None:
        self.check_slots(config)
        if self.answer == "word":
            check_labels(self, config)
        else:
            super().check(config)


BUILT_IN = (RNNConfig, TransformerConfig, LanguageModelConfig, EncoderConfig, ClassifierConfig, ReaderConfig)
