"""Image encoders: pixels become a grid of vectors that a decoder attends to, row by row from the top left.

Every encoder takes pixels (batch, 3, height, width) from 0 to 255, normalizes them itself, and gives
(batch, rows * columns, size). It knows its `grid` (rows, columns), the `size` of a cell's vector, and the `pixels` of a
side that it was made for.
"""

import itertools
import math
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config.model import BlockConfig
from regard.errors import ConfigError
from regard.nn.attention import SOURCE, Axes, multi_head_attention
from regard.nn.transformer import Encoder


class ImageEncoder(nn.Module):
    """What all encoders share: the normalization of pixels, which travels with the weights, and what is known of the
    grid."""

    mean: Tensor
    deviation: Tensor

    def __init__(
        self, pixels: int, grid: tuple[int, int], size: int, mean: Sequence[float], deviation: Sequence[float]
    ) -> None:
        super().__init__()
        self.pixels, self.grid, self.size = pixels, grid, size
        self.grids = {"key": grid}
        """Every grid that an attention may look at, by the name of its axis."""
        for name, numbers in (("mean", mean), ("deviation", deviation)):
            self.register_buffer(name, torch.tensor(numbers, dtype=torch.get_default_dtype()).view(-1, 1, 1))

    def normalize(self, pixels: Tensor) -> Tensor:
        """pixels (batch, 3, height, width) from 0 to 255 -> the same shape, as the weights expect it."""
        return (pixels.to(self.mean.dtype) - self.mean) / self.deviation

    def encode(self, images: Tensor) -> Tensor:
        """Normalized images (batch, 3, height, width) -> features (batch, size, rows, columns)."""
        raise NotImplementedError

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels (batch, 3, height, width) from 0 to 255 -> the grid (batch, rows * columns, size)."""
        return self.encode(self.normalize(pixels)).flatten(2).mT


MIDDLE = ([127.5] * 3, [64.0] * 3)
"""Mean and deviation of pixels, roughly, for encoders that are trained from scratch."""


RATE = 10.0
"""How much faster than the other weights the gate of a self-attention moves."""


class SpatialAttention(nn.Module):
    """Self-attention over a feature map (non-local block, Wang 2018; SAGAN, Zhang 2019): 1x1 convolutions make queries,
    keys and values, another mixes what was seen, and a learned gate lets it into the residual."""

    def __init__(self, channels: int, heads: int = 1, gate: float = 0.1, layer: int = 0, axes: Axes = SOURCE) -> None:
        super().__init__()
        if channels % heads:
            raise ConfigError(f"spatial attention of {channels} channels cannot be cut into {heads} heads of one size.")
        self.attention = multi_head_attention(channels, heads, kind="spatial", axes=axes, layer=layer)
        self.gate = nn.Parameter(torch.full((1,), gate / RATE))
        """What is learned is a part of it, so that it moves as if its learning rate were RATE times that of the other
        weights. At 0 the attention's own weights get no gradient until the gate has moved."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> the same shape."""
        cells = x.flatten(2).mT  # (batch, height * width, channels): there a 1x1 convolution is a linear layer
        seen: Tensor = self.attention(*self.attention.project_qkv(cells))
        return x + RATE * self.gate * seen.mT.reshape(x.shape)


class LayerNorm2d(nn.LayerNorm):
    """Layer norm of every cell by itself, over its channels (as in ConvNeXt, Liu 2022). Group or batch norm would tell
    each cell about all others: attention then looks anywhere. Nor does it have running averages, which the mean of
    several checkpoints would have to make anew."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> the same shape."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ConvBlock(nn.Module):
    """Two 3x3 convolutions with a residual around them, each behind a norm and a ReLU (pre-activation, He 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.norms = nn.ModuleList([LayerNorm2d(inputs), LayerNorm2d(outputs)])
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, bias=False)
        self.stride = stride
        for part in (self.first, self.second):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) -> (batch, outputs, height / stride, width / stride)."""
        before, between = self.norms
        active = F.relu(before(x))
        changed: Tensor = self.second(F.relu(between(self.first(active))))
        if self.shortcut is None:
            return changed + x
        # Not as the convolution's stride: oneDNN 3.12 writes past a gradient of fewer than 8 channels (AVX2, 1x1).
        skipped: Tensor = self.shortcut(active[..., :: self.stride, :: self.stride])
        return changed + skipped


def read_gates(model: nn.Module) -> dict[str, float]:
    """How far the gate of every self-attention over a feature map has opened, by the number of its stage."""
    found = [part for part in model.modules() if isinstance(part, SpatialAttention)]
    return {f"gate {part.attention.layer}": RATE * float(part.gate.detach()) for part in found}


class ResidualCNN(ImageEncoder):
    """A compact residual network to train from scratch. A stage is a number of blocks of one resolution; after those
    that are named, counted from 0, the map attends to itself."""

    def __init__(
        self,
        pixels: int,
        channels: Sequence[int] = (32, 64, 128),
        strides: Sequence[int] | None = None,
        blocks: int = 1,
        attention: Collection[int] = (),
        heads: int = 1,
        gate: float = 0.1,
    ) -> None:
        strides = strides or [2] * len(channels)
        if len(strides) != len(channels) or not set(attention) <= set(range(len(channels))):
            raise ConfigError(
                f"a CNN of {len(channels)} stages has {len(strides)} strides and attention after "
                f"{sorted(attention) or 'none'}: give a stride for each, and stages from 0 to {len(channels) - 1}."
            )
        sides = list(itertools.accumulate(strides, lambda side, stride: math.ceil(side / stride), initial=pixels))[1:]
        super().__init__(pixels, (sides[-1], sides[-1]), channels[-1], *MIDDLE)
        self.stem = nn.Conv2d(3, channels[0], 3, strides[0], padding=1, bias=False)
        self.stages = nn.ModuleList()
        before = channels[0]
        for number, (after, stride) in enumerate(zip(channels, strides, strict=True)):
            first = 1 if number == 0 else stride  # the stem has made the first stage smaller
            parts: list[nn.Module] = [ConvBlock(before, after, first)]
            parts += [ConvBlock(after, after) for _ in range(blocks - 1)]
            if number in attention:
                parts.append(SpatialAttention(after, heads, gate, number, self.name_axes(sides[number])))
            self.stages.append(nn.Sequential(*parts))
            before = after
        self.norm = LayerNorm2d(before)

    def name_axes(self, side: int) -> Axes:
        """The sides of a map of a feature map: the grid, or another one that is finer."""
        name = "key" if (side, side) == self.grid else f"{side}x{side}"
        self.grids[name] = (side, side)
        return Axes(name, name)

    def encode(self, images: Tensor) -> Tensor:
        """As `ImageEncoder.encode`."""
        x: Tensor = self.stem(images.contiguous(memory_format=torch.channels_last))
        for stage in self.stages:
            x = stage(x)
        return F.relu(self.norm(x))


class PatchEncoder(ImageEncoder):
    """Square patches are the tokens of a Transformer encoder (ViT, Dosovitskiy 2021)."""

    def __init__(self, pixels: int, block: BlockConfig, patch: int = 8, layers: int = 4) -> None:
        if pixels % patch:
            raise ConfigError(f"an image of {pixels} pixels cannot be cut into patches of {patch}: choose a divisor.")
        side = pixels // patch
        super().__init__(pixels, (side, side), block.size, *MIDDLE)
        self.patches = nn.Conv2d(3, block.size, patch, stride=patch)
        self.encoder = Encoder(block, layers, side * side)

    def forward(self, pixels: Tensor) -> Tensor:
        """As `ImageEncoder.forward`."""
        states: Tensor = self.encoder(super().forward(pixels), None)
        return states

    def encode(self, images: Tensor) -> Tensor:
        """As `ImageEncoder.encode`: the patches before they see each other."""
        embedded: Tensor = self.patches(images)
        return embedded
