"""Cross-entropy with label smoothing, as a sum and a count: averaging happens once, in the trainer."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.batching import Batch
from regard.data.vocabulary import PAD
from regard.nn.layers import widen

FEW = 2**18
"""Logits that stay in the cache as a whole table."""


class Loss(NamedTuple):
    """Sums over the wanted tokens, and how many there were."""

    total: Tensor  # () smoothed: what is minimised
    plain: Tensor  # () without smoothing, in nats: what perplexity is made of
    tokens: int


class Trainable(nn.Module):
    """All that the trainer knows of a model: called with a batch, it gives the loss of the batch's answers."""

    def forward(self, batch: Batch, label_smoothing: float = 0.0) -> Loss:
        raise NotImplementedError

    def gauges(self) -> dict[str, float]:
        """Numbers inside of it that are worth watching, by name: they are reported with every validation."""
        return {}


class Surprise(NamedTuple):
    """What perplexity is made of, row by row."""

    nats: Tensor  # (batch,) negative log-probability of each row's answer
    tokens: Tensor  # (batch,) wanted tokens of each row


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, answer: Tensor, label_smoothing: float = 0.0) -> Loss:
    """The loss of logits = hidden @ weight.T + bias against the answer.

    hidden (batch, target, size), weight (vocab, size), bias (vocab,), answer (batch, target) with PAD where nothing is
    wanted. The logits are made and used a block of rows at a time (see `Blockwise`), unless they are few.
    """
    hidden, rows, tokens = hidden.flatten(0, -2), answer.flatten(), int((answer != PAD).sum())
    if not label_smoothing and len(rows) * len(weight) <= FEW:
        logits = widen(F.linear(hidden, weight.to(hidden.dtype), bias.to(hidden.dtype)))
        total = F.cross_entropy(logits, rows, ignore_index=PAD, reduction="sum")
        return Loss(total, total.detach(), tokens)
    total, plain = Blockwise.apply(hidden, weight, bias, rows, label_smoothing)  # type: ignore[no-untyped-call]
    return Loss(total, plain, tokens)


class Blockwise(torch.autograd.Function):
    """Output layer and smoothed cross-entropy in one: each block of rows gives its loss and its gradients while it is
    in the cache, so a table of (tokens, vocabulary) never exists. A training step's largest tensor is gone with it."""

    CELLS = 2**21
    """Logits per block."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, answer: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """hidden (n, size), weight (vocab, size), bias (vocab,), answer (n,) -> (), ()."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total, plain = hidden.new_zeros((), dtype=wide), hidden.new_zeros((), dtype=wide)
        slopes = [torch.empty_like(hidden), torch.zeros_like(weight), torch.zeros_like(bias)]
        learning = any(ctx.needs_input_grad)
        rows = max(1, Blockwise.CELLS // len(weight))
        for start in range(0, len(hidden), rows):
            block = slice(start, start + rows)
            logits = F.linear(hidden[block], weight.to(hidden.dtype), bias.to(hidden.dtype)).to(wide)
            surprise, uniform, slope = smoothed(logits, answer[block, None], smoothing)
            plain += surprise.sum()
            total += (1 - smoothing) * surprise.sum() + smoothing * uniform.sum()
            if learning:
                slope = slope.to(hidden.dtype)
                torch.mm(slope, weight.to(hidden.dtype), out=slopes[0][block])
                slopes[1] += slope.T @ hidden[block]
                slopes[2] += slope.sum(0)
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    def backward(ctx: Any, total: Tensor, plain: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        return hidden * total.to(hidden.dtype), weight * total, bias * total, None, None


def smoothed(logits: Tensor, wanted: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """logits (n, vocab), wanted (n, 1) -> -log p(wanted) and the mean -log p, both (n, 1), zero where PAD is wanted,
    and the gradient of their smoothed sum, in the place of the logits."""
    real = wanted != PAD
    shifted = logits.sub_(logits.amax(-1, keepdim=True))
    picked, mean = shifted.gather(-1, wanted), shifted.mean(-1, keepdim=True)
    spread = shifted.exp_()
    sums = spread.sum(-1, keepdim=True)
    slope = spread.mul_(real / sums).sub_(smoothing / logits.shape[-1] * real)
    slope.scatter_add_(-1, wanted, (smoothing - 1) * real.to(logits.dtype))
    return (sums.log() - picked) * real, (sums.log() - mean) * real, slope


def classify_loss(logits: Tensor, wanted: Tensor, label_smoothing: float) -> Loss:
    """The loss of choosing one: logits (batch, choices), wanted (batch,)."""
    total = F.cross_entropy(logits, wanted, reduction="sum", label_smoothing=label_smoothing)
    plain = F.cross_entropy(logits.detach(), wanted, reduction="sum")
    return Loss(total, plain, len(wanted))


def token_surprise(logits: Tensor, answer: Tensor) -> Surprise:
    """Of logits or log-probabilities (batch, target, vocab) and answers (batch, target), with PAD for nothing."""
    nats = F.cross_entropy(logits.transpose(1, 2), answer, ignore_index=PAD, reduction="none")
    return Surprise(nats.sum(1), (answer != PAD).sum(1))
