"""Linear chains: distributions over sequences of tags, p(tags) ~ exp(sum of unary scores + sum of transition scores).

CRF, HMM and MEMM are this chain with other scores, and one dynamic program answers every question about it: forward and
backward over scaled probabilities, one matrix product a step, in float64. The gradient of the log-partition is the
marginals, so no graph of the steps is kept.

Scores are `unary` (batch, n, tags) and `transitions` from the row's tag to the column's: (tags, tags), the same at
every step, or (batch, n - 1, tags, tags). `lengths` (batch,) says how many of the n positions are real; none is
allowed. Minus infinity forbids.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

WIDEST = 600.0
"""How far apart scores may lie, in nats, before probabilities vanish in float64."""
TINY = 1e-300


class Marginals(NamedTuple):
    """What is expected under a chain."""

    log_partition: Tensor  # (batch,)
    tags: Tensor  # (batch, n, tags): how likely each tag is; zeros at padding
    transitions: Tensor  # (batch, tags, tags): how often each transition is expected
    entropy: Tensor  # (batch,), in nats


class Scaled(NamedTuple):
    """Scores as probabilities up to a factor, of chains in the order of their lengths, longest first."""

    unary: Tensor  # (n, batch, tags)
    transitions: Tensor  # (tags, tags) or (n - 1, batch, tags, tags)
    factor: Tensor  # (batch,): the logarithm of what was divided by
    order: Tensor  # (batch,): which chain each row is
    reach: list[int]  # how many rows reach each position

    def into(self, t: int) -> Tensor:
        """The transitions into position t, of the rows that reach it."""
        return self.transitions if self.transitions.dim() == 2 else self.transitions[t - 1, : self.reach[t]]


def step(messages: Tensor, matrices: Tensor) -> Tensor:
    """messages (batch, tags) times (tags, tags) or (batch, tags, tags)."""
    return messages @ matrices if matrices.dim() == 2 else (messages[:, None] @ matrices)[:, 0]


def scale(unary: Tensor, transitions: Tensor, lengths: Tensor) -> Scaled:
    """Exponentials in float64 whose greatest is 1 at every step."""
    n = unary.shape[1]
    order = lengths.argsort(descending=True, stable=True)
    real = torch.arange(n, device=unary.device) < lengths[:, None]
    unary, transitions = unary.detach().double(), transitions.detach().double()
    top = unary.amax(-1).nan_to_num(neginf=0.0)
    peak = transitions.amax((-2, -1), keepdim=True).nan_to_num(neginf=0.0) if transitions.numel() else torch.zeros(1)
    taken = (top * real).sum(1) + (peak.reshape(-1, max(n - 1, 1) if peak.dim() > 2 else 1) * real[:, 1:]).sum(1)
    scaled = (transitions - peak).exp() if transitions.numel() else transitions
    return Scaled(
        unary=(unary - top[..., None]).exp()[order].transpose(0, 1).contiguous(),
        transitions=scaled if scaled.dim() == 2 else scaled[order].transpose(0, 1).contiguous(),
        factor=taken[order],
        order=order,
        reach=real.sum(0).tolist(),
    )


def forward(chain: Scaled) -> tuple[Tensor, Tensor]:
    """How likely each tag is, given what came before it: (n, batch, tags), and what each step was divided by to make
    them sum to 1: (n, batch)."""
    messages, sums = torch.zeros_like(chain.unary), torch.ones_like(chain.unary[..., 0])
    for t, count in enumerate(chain.reach):
        now = chain.unary[t, :count]
        if t:
            now = now * step(messages[t - 1, :count], chain.into(t))
        sums[t, :count] = total = now.sum(-1)
        torch.div(now, total[:, None].clamp(min=TINY), out=messages[t, :count])
    return messages, sums


def backward(chain: Scaled, sums: Tensor) -> tuple[Tensor, Tensor]:
    """What comes after each tag (n, batch, tags), in a scale in which its product with the forward message is the
    marginal; and the same with the step's own scores, as the step before it sees it."""
    behind, seen = torch.ones_like(chain.unary), torch.zeros_like(chain.unary)
    for t in range(len(chain.reach) - 1, 0, -1):
        count = chain.reach[t]
        seen[t, :count] = chain.unary[t, :count] * behind[t, :count] / sums[t, :count, None].clamp(min=TINY)
        behind[t - 1, :count] = step(seen[t, :count], chain.into(t).mT)
    return behind, seen


def restore(chain: Scaled, rows: Tensor) -> Tensor:
    """Rows (batch, ..) in the order in which the chains came."""
    return torch.empty_like(rows).index_copy_(0, chain.order, rows)


def is_wide(unary: Tensor, transitions: Tensor) -> bool:
    """Whether scores lie so far apart that only logarithms can add them up."""

    def spread(scores: Tensor) -> float:
        allowed = scores[scores.isfinite()]
        return float(allowed.max() - allowed.min()) if allowed.numel() else 0.0

    rough = spread(unary.detach()) + spread(transitions.detach())
    if rough <= WIDEST:
        return False
    centred = unary.detach() - unary.detach().amax(-1, keepdim=True)
    return spread(centred) + spread(transitions.detach()) > WIDEST


class LogPartition(torch.autograd.Function):
    """The log-partition (batch,) of chains; its gradient is the marginals and the expected transitions."""

    @staticmethod
    def forward(ctx: Any, unary: Tensor, transitions: Tensor, lengths: Tensor) -> Tensor:
        chain = scale(unary, transitions, lengths)
        messages, sums = forward(chain)
        ctx.save_for_backward(*chain[:4], messages, sums)
        ctx.reach, ctx.dtypes = chain.reach, (unary.dtype, transitions.dtype)
        return restore(chain, sums.log().sum(0) + chain.factor).to(unary.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        own, moves, factor, order, messages, sums = ctx.saved_tensors
        chain = Scaled(own, moves, factor, order, ctx.reach)
        behind, seen = backward(chain, sums)
        weights = gradient.double()[chain.order]
        real = torch.arange(len(chain.reach), device=gradient.device)[:, None] < count_positions(chain)
        unary = messages * behind * (weights * real)[..., None]
        pairs: Tensor | None = None
        if ctx.needs_input_grad[1]:
            if chain.transitions.dim() == 2:
                pairs = torch.einsum("tbi,tbj->ij", messages[:-1] * weights[:, None], seen[1:]) * chain.transitions
            else:
                pairs = (messages[:-1] * weights[:, None])[..., None] * chain.transitions * seen[1:, :, None]
                pairs = restore(chain, pairs.transpose(0, 1))
            pairs = pairs.to(ctx.dtypes[1])
        return restore(chain, unary.transpose(0, 1)).to(ctx.dtypes[0]), pairs, None


def count_positions(chain: Scaled) -> Tensor:
    """The lengths (batch,) of the rows of scaled chains."""
    rows = torch.arange(chain.unary.shape[1], device=chain.unary.device)
    return sum((rows < count for count in chain.reach), torch.zeros_like(rows))


def log_partition(unary: Tensor, transitions: Tensor, lengths: Tensor) -> Tensor:
    """The logarithm (batch,) of the sum over all taggings; minus infinity where none is allowed."""
    if is_wide(unary, transitions):
        return log_partition_in_logs(unary, transitions, lengths)
    found: Tensor = LogPartition.apply(unary, transitions, lengths)  # type: ignore[no-untyped-call]
    return found


def log_partition_in_logs(unary: Tensor, transitions: Tensor, lengths: Tensor) -> Tensor:
    """The same by logarithms alone, which no scores are too far apart for; slower, and autograd keeps every step."""
    messages = unary[:, 0] if unary.shape[1] else unary.new_zeros(len(unary), 1)
    for t in range(1, unary.shape[1]):
        matrices = transitions if transitions.dim() == 2 else transitions[:, t - 1]
        after = (messages[:, :, None] + matrices).logsumexp(1) + unary[:, t]
        messages = torch.where((t < lengths)[:, None], after, messages)
    return torch.where(lengths > 0, messages.logsumexp(1), 0.0)


def path_score(unary: Tensor, transitions: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
    """The score (batch,) of one tagging (batch, n) of each chain."""
    n = unary.shape[1]
    real = torch.arange(n, device=unary.device) < lengths[:, None]
    own = unary.gather(-1, tags[..., None])[..., 0]
    if transitions.dim() == 2:
        pairs = transitions[tags[:, :-1], tags[:, 1:]]
    else:
        rows = transitions.gather(2, tags[:, :-1, None, None].expand(-1, -1, 1, unary.shape[-1]))
        pairs = rows[:, :, 0].gather(-1, tags[:, 1:, None])[..., 0]
    return own.masked_fill(~real, 0.0).sum(1) + pairs.masked_fill(~real[:, 1:], 0.0).sum(1)


def marginals(unary: Tensor, transitions: Tensor, lengths: Tensor) -> Marginals:
    """How likely each tag and transition is, and how sure the chain is of it all."""
    every = transitions if transitions.dim() > 2 else transitions.expand(len(unary), max(unary.shape[1] - 1, 0), -1, -1)
    with torch.inference_mode(False), torch.enable_grad():
        own, pairs = (part.detach().to(torch.float64, copy=True).requires_grad_() for part in (unary, every))
        total = log_partition(own, pairs, lengths)
        tags, moves = torch.autograd.grad(total.sum(), (own, pairs))
    total, tags, moves = total.detach(), tags.nan_to_num(0.0), moves.nan_to_num(0.0)
    expected = (tags * own.detach().clamp(min=-1e30)).sum((1, 2))
    expected += (moves * pairs.detach().clamp(min=-1e30)).sum((1, 2, 3))
    kind = unary.dtype
    return Marginals(total.to(kind), tags.to(kind), moves.sum(1).to(kind), (total - expected).to(kind))


def best_paths(unary: Tensor, transitions: Tensor, lengths: Tensor, count: int = 1) -> tuple[Tensor, Tensor]:
    """Viterbi: the `count` best taggings (batch, count, n) of each chain, best first, and their scores (batch, count),
    minus infinity where a chain has fewer; zeros stand at padding."""
    batch, n, tags = unary.shape
    scores = unary.new_full((batch, count, tags), -torch.inf)
    if not n:
        alone = unary.new_full((batch, count), -torch.inf)  # the empty tagging
        alone[:, 0] = 0.0
        return unary.new_zeros(batch, count, 0, dtype=torch.long), alone
    scores[:, 0] = unary[:, 0]
    pointers = []
    for t in range(1, n):
        matrices = transitions if transitions.dim() == 2 else transitions[:, t - 1, None]
        candidates = (scores[..., None] + matrices).flatten(1, 2)  # (batch, count * tags, tags)
        found, places = candidates.topk(count, dim=1) if count > 1 else candidates.max(1, keepdim=True)
        pointers.append(places)
        scores = torch.where((t < lengths)[:, None, None], found + unary[:, t, None], scores)
    total, place = scores.flatten(1).topk(count, dim=1)
    paths = torch.zeros(batch, count, n, dtype=torch.long, device=unary.device)
    for t in range(n - 1, -1, -1):
        real = (t < lengths)[:, None]
        paths[..., t] = torch.where(real, place % tags, 0)
        if t:
            before = pointers[t - 1].flatten(1).gather(1, place)
            place = torch.where(real, before, place)
    empty = lengths[:, None] == 0
    first = torch.arange(count, device=unary.device) == 0
    return paths, torch.where(empty, torch.where(first, 0.0, -torch.inf), total)


def sample(unary: Tensor, transitions: Tensor, lengths: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One tagging (batch, n) of each chain, drawn from its distribution; zeros stand at padding."""
    chain = scale(unary, transitions, lengths)
    messages, _ = forward(chain)
    paths = torch.zeros(messages.shape[:2], dtype=torch.long, device=unary.device)
    for t in range(len(chain.reach) - 1, -1, -1):
        count = chain.reach[t]
        chances = messages[t, :count].clone()
        later = chain.reach[t + 1] if t + 1 < len(chain.reach) else 0
        if later:
            matrices = chain.into(t + 1)
            rows = matrices.T[paths[t + 1, :later]] if matrices.dim() == 2 else pick(matrices, paths[t + 1, :later])
            chances[:later] *= rows
        paths[t, :count] = torch.multinomial(chances, 1, generator=generator)[:, 0] if count else 0
    return restore(chain, paths.T)


def pick(matrices: Tensor, tags: Tensor) -> Tensor:
    """The columns (batch, tags) of matrices (batch, tags, tags) that lead to some tags (batch,)."""
    return matrices[torch.arange(len(tags), device=tags.device), :, tags]


def scan(matrices: Tensor, *, reverse: bool = False) -> Tensor:
    """The products of matrices (.., n, 2, 2) with all before each, or with all behind, each up to a factor that makes
    its greatest entry 1: as many rounds as n has binary digits, not n steps."""
    n, reach = matrices.shape[-3], 1
    while reach < n:
        if reverse:
            moved = matrices[..., :-reach, :, :] @ matrices[..., reach:, :, :]
            matrices = torch.cat([moved, matrices[..., n - reach :, :, :]], dim=-3)
        else:
            moved = matrices[..., :-reach, :, :] @ matrices[..., reach:, :, :]
            matrices = torch.cat([matrices[..., :reach, :, :], moved], dim=-3)
        matrices = matrices / matrices.detach().amax((-2, -1), keepdim=True)
        reach *= 2
    return matrices


def segment_marginals(scores: Tensor, transitions: Tensor, mask: Tensor | None = None) -> Tensor:
    """How likely each key is chosen, in chains of two tags (0: not chosen, 1: chosen) over the keys that may be seen:
    scores (.., key) of tag 1 against tag 0, transitions (2, 2), mask broadcasting to the scores -> (.., key)."""
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    first = seen & (seen.cumsum(-1) == 1)
    unary = torch.stack([F.logsigmoid(-scores), F.logsigmoid(scores)], dim=-1).exp()  # their greater is at least 1/2
    moves = (transitions - transitions.detach().max()).exp()
    into = torch.where(first[..., None, None], torch.ones_like(moves), moves) * unary[..., None, :]
    into = torch.where(seen[..., None, None], into, torch.eye(2, dtype=scores.dtype, device=scores.device))
    before = scan(into).sum(-2)  # (.., key, tag)
    after = scan(into, reverse=True).sum(-1)  # of this key and all behind it
    behind = torch.cat([after[..., 1:, :], torch.ones_like(after[..., :1, :])], dim=-2)
    both = before * behind
    return torch.where(seen, both[..., 1] / both.sum(-1), 0.0)
