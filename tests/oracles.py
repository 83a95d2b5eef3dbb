"""Slow and obvious forms of fast things, rivals with the same weights, and the exact numbers to compare them in."""

import itertools
import math
import string
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor, nn

from regard.attention.equation import Attended
from regard.config.text import Tokenization
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL, Vocabulary
from regard.nn.attention import Attention
from regard.nn.state import Steppable

Module = TypeVar("Module", bound=nn.Module)
EXACT = {"rtol": 0.0, "atol": 1e-10}


@pytest.fixture
def exact() -> Iterator[None]:
    """New numbers are 64 bits wide, and the random ones repeat."""
    torch.manual_seed(7)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def shaken(module: Module) -> Module:
    """The module with every parameter drawn anew, and no dropout: a bias that begins as zero hides that it is lost."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval()


def assert_half_dropped(dropped: Tensor) -> None:
    """Of ones that went through a dropout of 0.5, half are zeros and the others are twos, within five sigma."""
    assert dropped.unique().tolist() == [0, 2]
    assert abs((dropped == 0).double().mean().item() - 0.5) < 5 * 0.5 / dropped.numel() ** 0.5


def attend_slowly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    score: Callable[[Sequence[float], Sequence[float]], float],
) -> Attended:
    """`attend`, a number at a time: query (batch, heads, query, size), mask (batch, heads, query, key), a score of two
    lists of numbers."""
    contexts, weights = torch.empty(*query.shape[:-1], values.shape[-1]), torch.empty(mask.shape)
    for b, h, q in itertools.product(*map(range, query.shape[:-1])):
        asked, seen = query[b, h, q].tolist(), mask[b, h, q].tolist()
        raised = [math.exp(score(asked, key)) if seen[k] else 0.0 for k, key in enumerate(keys[b, h].tolist())]
        shares = [one / (sum(raised) or 1.0) for one in raised]
        columns = values[b, h].mT.tolist()
        weights[b, h, q] = torch.tensor(shares)
        contexts[b, h, q] = torch.tensor(
            [sum(share * value for share, value in zip(shares, column, strict=True)) for column in columns]
        )
    return Attended(contexts, weights)


def hardmax(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """A normalizer that no model has: all weight on the best key that may be seen, none for a blind query."""
    mask = torch.ones((), dtype=torch.bool) if mask is None else mask
    seen = mask.expand(scores.shape)
    best = scores.masked_fill(~seen, -torch.inf).argmax(-1)
    return nn.functional.one_hot(best, scores.shape[-1]).to(scores.dtype) * seen.any(-1, keepdim=True)


def rival(attention: Attention) -> nn.MultiheadAttention:
    """torch's own layer with the same weights."""
    theirs = nn.MultiheadAttention(attention.output.in_features, attention.heads, batch_first=True)
    theirs.in_proj_weight = nn.Parameter(attention.projection.weight.detach().clone())
    theirs.in_proj_bias = nn.Parameter(attention.projection.bias.detach().clone())
    theirs.out_proj = attention.output
    return theirs


def three_maps(attention: Attention) -> list[nn.Linear]:
    """The maps of queries, keys and values of a multi-head attention, each as a layer of its own."""
    size = attention.projection.in_features
    layers = [nn.Linear(size, size) for _ in range(3)]
    for layer, weight, bias in zip(
        layers, attention.projection.weight.chunk(3), attention.projection.bias.chunk(3), strict=True
    ):
        layer.weight, layer.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    return layers


def entries(size: int) -> Vocabulary:
    """A vocabulary of so many entries, special ones and letters."""
    found = Vocabulary.learn([string.ascii_letters[: size - len(SPECIAL)]], Tokenization(kind="char"))
    assert found.size == size
    return found


class Scored(NamedTuple):
    """One output, without <bos> and <eos>, and what it is ranked by."""

    tokens: list[int]
    score: float


def all_sequences(model: Steppable, source: Tensor, limit: int, alpha: float) -> list[Scored]:
    """Every output of one source (source,) that has at most `limit` tokens before its <eos>, best first."""
    found: list[Scored] = []

    def extend(tokens: list[int], total: float, state: object) -> None:
        logprobs, state = model.step(torch.tensor([tokens[-1] if tokens else BOS]), state)
        for token, logprob in enumerate(logprobs[0].tolist()):
            if token == EOS:
                found.append(Scored(tokens, (total + logprob) / ((5 + len(tokens) + 1) / 6) ** alpha))
            elif token not in (PAD, BOS) and len(tokens) < limit:
                extend([*tokens, token], total + logprob, state)

    with torch.inference_mode():
        extend([], 0.0, model.start(source[None], torch.tensor([len(source)])))
    return sorted(found, key=lambda output: -output.score)
