"""What decoding sees of a model: `start` and `step`, and states whose every tensor is row-first."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class State(NamedTuple):
    """What decoding carries along. Every tensor is row-first: rows of `source` are sentences, rows of `cache` are
    hypotheses, so re-ordering beams is indexing `cache` and dropping a finished sentence is indexing both."""

    source: Any
    cache: Any  # A KV cache, or the hidden state of a recurrent decoder
    first: Tensor | None = None  # (sentences,) the token that the first step reads; None: <bos>


def select_rows(tree: Any, index: Tensor) -> Any:
    """Every tensor of a state (tuples of tensors and tuples), its rows chosen and ordered by an index."""
    if isinstance(tree, tuple):
        parts = [select_rows(part, index) for part in tree]
        return tree._make(parts) if hasattr(tree, "_make") else tuple(parts)
    return tree.index_select(0, index) if isinstance(tree, Tensor) else tree


@runtime_checkable
class Steppable(Protocol):
    """All that decoding knows of a model."""

    def start(self, source: Tensor, lengths: Tensor) -> State:
        """Read sources (sentences, source) of some lengths (sentences,)."""

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """tokens (rows,) -> log-probabilities of the next ones (rows, vocab), and the state after them."""


class Hypothesis(NamedTuple):
    """One output of decoding, without <bos> and <eos>."""

    tokens: list[int]
    score: float  # what hypotheses are ranked by: the log-probability over the length penalty
    logprobs: list[float] | None  # of each token, and of <eos>; None: nobody asked for them
