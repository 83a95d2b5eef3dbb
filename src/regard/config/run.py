"""Everything that makes a run: data, text, model, training, decoding, evaluation.

A default is written once, on its field; the string below a field is its documentation. Alternatives are unions chosen
by `kind`. Everything is checked before any tensor exists.
"""

import itertools
import typing
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from regard.config.data import Data
from regard.config.model import BUILT_IN, ModelConfig
from regard.config.settings import Count, Settings, Share
from regard.config.structure import LineupConfig, TaggerConfig
from regard.config.text import TextConfig
from regard.config.vision import CaptionerConfig, ImageClassifierConfig


class TrainConfig(Settings):
    """How the weights are learned."""

    epochs: Count = 100
    """Passes over the training data, where `steps` is not given."""
    steps: Count | None = None
    """Updates in all; without it, those of `epochs`."""
    minutes: Annotated[float, Field(gt=0)] | None = None
    """Training also ends when it has taken this long, validations and what came before a resume included: it validates
    once more, and keeps the best. A cosine schedule then ends with the time, so how far it comes depends on the
    machine, and a resumed training is not the same to the last digit."""
    batch_tokens: Count = 4096
    """Padded tokens of a batch: rows times the longer side's longest row."""
    accumulate: Count = 1
    """Batches per update."""
    checkpoint_activations: bool = False
    """Keep only what goes into every Transformer block, and compute its inside again for the gradient: less memory, a
    third more time."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """adamw decouples weight decay from the gradient."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    schedule: Literal["inverse sqrt", "cosine", "constant"] = "inverse sqrt"
    """How the learning rate decays after its peak."""
    warmup: Annotated[int, Field(ge=0)] | None = None
    """Updates over which the learning rate grows from zero to its peak; without it, a tenth of all, at most 400."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    """Decay rates of Adam's two moving averages: of gradients, and of their squares."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay."""
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the whole gradient; inf does not clip."""
    label_smoothing: Share = 0.1
    """Label smoothing: this share of the target distribution is spread over all entries."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Mixed precision; auto: bfloat16 where a measurement says that this machine multiplies it faster."""
    average_checkpoints: Count = 1
    """Checkpoints whose weights are averaged into the model that is validated and kept."""
    validate_every: Count | None = None
    """Updates between validations, each of which makes a checkpoint; without it, a twentieth of all, at most 1,000."""
    validate_examples: Count = 1000
    """At most this many validation examples are decoded."""
    save_every: Count | None = None
    """Updates between saves of the resumable state, beside those at validations."""
    patience: Annotated[int, Field(ge=0)] = 10
    """Validations without a better score before training stops early; 0: never."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Of the first weights, the order of batches, dropout and generated data."""

    def resolve(self, batches: int) -> "TrainConfig":
        """The same settings with every number of updates, for training data of so many batches an epoch."""
        steps = self.steps or self.epochs * -(-batches // self.accumulate)
        warmup = min(400, steps // 10) if self.warmup is None else self.warmup
        every = self.validate_every or min(1000, -(-steps // 20))
        return self.model_copy(update={"steps": steps, "warmup": warmup, "validate_every": every})


class DecodeConfig(Settings):
    """How outputs are decoded."""

    beam_size: Count = 4
    """Hypotheses that beam search keeps; 1 is greedy search."""
    length_penalty: Annotated[float, Field(ge=0, le=10)] = 0.6
    """Alpha of ((5 + length) / 6) ** alpha, by which a log-probability is divided."""
    max_ratio: Annotated[float, Field(ge=0, le=1000)] = 1.5
    """An output has at most max_ratio times the source's tokens + max_extra."""
    max_extra: Annotated[int, Field(ge=1, le=10**6)] = 20
    """See `max_ratio`."""
    no_repeat_ngram: Annotated[int, Field(ge=0, le=10**6)] = 0
    """No n-gram of this size comes twice in an output; 0: no limit."""
    sample: bool = False
    """Sample tokens instead of searching for the best output."""
    temperature: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] = 1.0
    """Sampling: softmax temperature; below 1 the likely become likelier."""
    top_k: Annotated[int, Field(ge=1, le=10**6)] | None = None
    """Sampling: only from this many of the likeliest tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sampling: only from the likeliest tokens that together have this share of what `top_k` left (nucleus)."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Sampling: the same seed gives a text the same answer, whatever else is decoded with it."""
    min_length: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Tokens that an output has at least, as far as the limit above allows."""
    slide: bool = False
    """Whether a language model goes on past the context it was trained for by dropping the oldest tokens (rotary and
    ALiBi positions)."""
    quantization: Literal["float32", "int8", "int8_float32", "int16", "bfloat16"] = "float32"
    """How CTranslate2 stores and multiplies weights, where it decodes; int8 is faster and less exact."""

    @model_validator(mode="after")
    def sampling_is_on(self) -> "DecodeConfig":
        asked = [name for name in ("temperature", "top_k", "top_p") if getattr(self, name) not in (None, 1.0)]
        if asked and not self.sample:
            raise ValueError(f"{' and '.join(asked)} would do nothing without sampling: set decode.sample = true too")
        return self


class EvaluateConfig(Settings):
    """What is measured; the first metric decides which checkpoint is best."""

    metrics: Annotated[tuple[str, ...], Field(min_length=1)] = ("bleu", "chrf", "exact", "perplexity")
    """Several, by name (docs/tasks.md says which fit which task)."""
    unseen: bool = False
    """Leave out examples whose source is in the training data."""
    multi_reference: bool = False
    """Whether several targets of one source are all references for it (pronunciations), not examples of their own."""
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
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    decode: DecodeConfig = DecodeConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def model_fits_run(self) -> "Config":
        self.model.check(self)
        return self


MODELS: dict[str, type[ModelConfig]] = {}
"""The kinds of models; `Config.model` is one of them, chosen by its kind."""


def register_models(*settings: type[ModelConfig]) -> None:
    """Add kinds of models to those that a run may have."""
    for one in settings:
        MODELS.update(dict.fromkeys(typing.get_args(one.model_fields["kind"].annotation), one))
    known = tuple(dict.fromkeys(MODELS.values()))
    choice: Any = Annotated[typing.Union[known], Field(discriminator="kind")] if len(known) > 1 else known[0]  # noqa: UP007
    Config.model_fields["model"] = FieldInfo.from_annotation(choice)
    Config.model_rebuild(force=True)


register_models(*BUILT_IN, TaggerConfig, LineupConfig, CaptionerConfig, ImageClassifierConfig)
