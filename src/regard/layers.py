"""Small parts that every family uses: dropout, embeddings (random or loaded from a file of vectors), the output."""

import io
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import DataError
from regard.files import MARK, content


class Linear(nn.Linear):
    """A linear map that is called directly: torch's way through hooks costs more than the product of one row."""

    __call__ = nn.Linear.forward


class RMSNorm(nn.RMSNorm):
    """A norm by the root of the mean square alone (Zhang 2019), called directly, as `Linear`."""

    __call__ = nn.RMSNorm.forward


class LayerNorm(nn.LayerNorm):
    """A layer norm that is called directly, as `Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape that ends in the size -> the same shape."""
        return torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps, False)

    __call__ = forward


def norm(size: int, kind: str = "layer", epsilon: float = 1e-5) -> LayerNorm | RMSNorm:
    """A norm over the last dimension."""
    return LayerNorm(size, eps=epsilon) if kind == "layer" else RMSNorm(size, eps=epsilon)


def settle(model: nn.Module) -> None:
    """Make a model that will only be used, not trained, quick for few rows on a CPU; its numbers stay the same. Linear
    maps are laid out by column, up to twice as fast; parts become plain attributes, which torch looks up slowly."""
    for module in model.modules():
        if isinstance(module, Linear | Output):
            module.weight.data = module.weight.data.t().contiguous().t()
        vars(module).update(module._modules | module._parameters)


class Dropout(nn.Module):
    """Dropout whose probability is a multiple of 1/256: one 64-bit random number decides eight elements, which is
    several times as fast on a CPU (docs/log.md). What is kept is scaled by the share that is kept."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.threshold = min(255, max(1, round(probability * 256))) if probability else 0

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        if not self.training or not self.threshold:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.threshold / 256)
        draws = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
        keep = (draws.view(torch.uint8)[: x.numel()] >= self.threshold).view(x.shape)
        return x * (keep.to(x.dtype) * (256 / (256 - self.threshold)))

    __call__ = forward


def wide(logits: Tensor) -> Tensor:
    """At least 32 bits, in which losses and probabilities are made."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def embedding(vocab: int, size: int) -> nn.Embedding:
    """A random embedding whose rows have a length of about 1."""
    table = nn.Embedding(vocab, size)
    nn.init.normal_(table.weight, std=size**-0.5)
    return table


class Output(nn.Module):
    """The last layer: hidden (.., size) -> logits (.., vocab). With `tied`, its matrix is that embedding's."""

    def __init__(self, vocab: int, size: int, tied: nn.Embedding | None) -> None:
        super().__init__()
        self.weight = embedding(vocab, size).weight if tied is None else tied.weight
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)

    __call__ = forward


def load_vectors(table: nn.Embedding, path: str, find: Callable[[str], int | None], *, freeze: bool) -> int:
    """Fill the rows of an embedding whose word is in a text file of vectors: a word and its numbers on every line,
    with or without a first line `count size`. Words without a vector keep their random row. Of several
    spellings of one word the first counts. Returns how many rows were filled."""
    size, filled = table.weight.shape[1], set()
    raw = io.BytesIO(content(path).removeprefix(MARK))
    parted = ((number, line.decode("utf-8", "replace").rstrip().split(" ")) for number, line in enumerate(raw, 1))
    lines: Iterator[tuple[int, list[str]]] = (pair for pair in parted if pair[1] != [""])
    first, header = next(lines, (1, []))
    if len(header) == 2 and size != 1 and all(part.isdigit() for part in header):
        width = int(header[1])
    else:
        width, lines = len(header) - 1, itertools.chain([(first, header)], lines)
    if width != size:
        raise DataError(
            f"{path} holds vectors of {width:,} numbers, but the embedding is {size:,} wide. "
            "Set the model's embedding size to the file's."
        )
    for number, parts in lines:
        if len(parts) <= size:
            raise DataError(f"{path}:{number} is not a word and {size} finite numbers.")
        row = find(" ".join(parts[:-size]))
        if row is None or row in filled:  # frequent spellings come first
            continue
        try:
            vector = torch.tensor([float(value) for value in parts[-size:]])
        except ValueError as error:
            raise DataError(f"{path}:{number} is not a word and {size} numbers: {error}.") from error
        if not vector.isfinite().all():
            raise DataError(f"{path}:{number} is not a word and {size} finite numbers.")
        with torch.no_grad():
            table.weight[row] = vector
        filled.add(row)
    if not filled:
        raise DataError(
            f"no word of {path} is in the vocabulary: nothing was loaded. Is it the same language and kind?"
        )
    table.weight.requires_grad_(not freeze)
    return len(filled)
