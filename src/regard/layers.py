"""Small parts that every family uses: dropout, embeddings (random or loaded from a file of vectors), the output."""

import functools
import io
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import mkldnn

from regard.errors import DataError
from regard.files import MARK, content

PACKED, ENOUGH = 2**17, 2**28
"""The smallest matrix that is packed, and how many numbers of a model are at the most: they are kept twice."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """x (.., in) times a matrix (out, in), with a bias (out,) -> (.., out); `packed` is the same matrix, laid out for
    quick products where nothing is learned."""
    if packed is None or x.dtype != torch.float32 or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    mapped: Tensor = one_dnn()(x, packed, bias, "none", [], "")
    return mapped


@functools.cache
def one_dnn() -> Callable[..., Tensor]:
    """oneDNN's linear map of packed matrices."""
    found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    return found


class Linear(nn.Linear):
    """A linear map that is called directly: torch's way through hooks costs more than the product of one row."""

    packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(.., in) -> (.., out)."""
        return product(x, self.weight, self.bias, self.packed)

    __call__ = forward


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
    """Make a model that will only be used, not changed any more, quick on a CPU; its numbers stay the same. Large
    matrices are packed, small ones laid out by column (docs/log.md has the figures); parts become plain attributes,
    which torch looks up slowly."""
    room = ENOUGH
    for module in model.modules():
        if isinstance(module, Linear | Output):
            weight = module.weight.data
            quick = weight.is_cpu and weight.dtype == torch.float32 and mkldnn.is_available()  # type: ignore[no-untyped-call]
            if quick and PACKED <= weight.numel() <= room:
                module.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
                room -= weight.numel()
            else:
                module.weight.data = weight.t().contiguous().t()
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


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities (rows, vocab) of logits, which are not needed any more: where nothing is learned they are
    written over, for a large table takes long to write anew."""
    logits = wide(logits)
    return logits.log_softmax(-1) if torch.is_grad_enabled() else torch.log_softmax(logits, -1, out=logits)


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
        self.packed: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        return product(hidden, self.weight, self.bias, self.packed)

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
