"""Chains, trees and segments against pytorch-crf and torch-struct: forward and backward, in turns, same scores.

Times are of one thread, of the processor alone, so that others on the machine do not count; the ratio is the rival's
median over ours, so more than 1 is faster. torch-struct is not among the dependencies: it was last released in 2021,
and its projective trees with one root do not run on a torch of today, so those are compared with many roots, which is
less work. How far results differ is printed beside.

    pip install --no-deps --target rivals torch-struct
    PYTHONPATH=rivals python benchmarks/structure.py --rounds 7
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from regard.attention import chain, trees

BATCH, LENGTH, TAGS, WORDS = 64, 50, 25, 40
Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""Ours and theirs: each computes, goes backward, and gives what can be compared."""


def compare_crf() -> Pair:
    """The likelihood of a CRF and its gradient."""
    from torchcrf import CRF

    crf = CRF(TAGS, batch_first=True)
    unary = torch.randn(BATCH, LENGTH, TAGS, requires_grad=True)
    tags, lengths = torch.randint(TAGS, (BATCH, LENGTH)), torch.full((BATCH,), LENGTH)

    def ours() -> Tensor:
        ends = torch.zeros_like(unary).index_add(1, torch.tensor([0]), crf.start_transitions.expand(BATCH, 1, -1))
        own = unary + ends.index_add(1, torch.tensor([LENGTH - 1]), crf.end_transitions.expand(BATCH, 1, -1))
        score = chain.path_score(own, crf.transitions, tags, lengths)
        found = (score - chain.log_partition(own, crf.transitions, lengths)).sum()
        found.backward()
        return found.detach()

    def theirs() -> Tensor:
        found = crf(unary, tags)
        found.backward()
        return found.detach()

    return ours, theirs


def compare_viterbi() -> Pair:
    """The best tagging."""
    from torchcrf import CRF

    crf = CRF(TAGS, batch_first=True)
    torch.nn.init.zeros_(crf.start_transitions)
    torch.nn.init.zeros_(crf.end_transitions)
    unary, lengths = torch.randn(BATCH, LENGTH, TAGS), torch.full((BATCH,), LENGTH)
    moves = crf.transitions.detach()
    return (
        lambda: chain.best_paths(unary, moves, lengths)[0][:, 0].float(),
        lambda: torch.tensor(crf.decode(unary)).float(),
    )


def compare_chain() -> Pair:
    """The marginals of a chain, by the gradient of its partition."""
    import torch_struct

    unary, moves = torch.randn(BATCH, LENGTH, TAGS), torch.randn(TAGS, TAGS)
    lengths = torch.full((BATCH,), LENGTH)
    edges = moves.mT + unary[:, 1:, :, None]
    edges[:, 0] += unary[:, 0, None]

    def ours() -> Tensor:
        own = unary.clone().requires_grad_()
        return torch.autograd.grad(chain.log_partition(own, moves, lengths).sum(), own)[0][:, 1:]

    def theirs() -> Tensor:
        return torch_struct.LinearChainCRF(edges.clone().requires_grad_()).marginals.sum(-1)

    return ours, theirs


def compare_trees(projective: bool) -> Pair:
    """Soft parents, and the gradient of a loss of theirs."""
    import torch_struct

    scores, lengths = torch.randn(BATCH, WORDS, WORDS), torch.full((BATCH,), WORDS)
    own = trees.projective_marginals if projective else trees.tree_marginals
    rival = torch_struct.DependencyCRF if projective else torch_struct.NonProjectiveDependencyCRF

    def ours() -> Tensor:
        arcs = scores.clone().requires_grad_()
        found = own(arcs, lengths)
        found.pow(2).sum().backward()
        return found.detach()

    def theirs() -> Tensor:
        arcs = scores.clone().requires_grad_()
        found = rival(arcs.mT * 1, multiroot=projective).marginals
        found.pow(2).sum().backward()
        return found.detach().mT

    return ours, theirs


def measure(name: str, pair: Pair, rounds: int, table: Table) -> None:
    """One row: the median milliseconds of both, taken in turns, and their ratio."""
    results = [run() for run in pair]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, kept in zip(pair, times, strict=True):
            begin = time.process_time()
            run()
            kept.append(1000 * (time.process_time() - begin))
    medians = [statistics.median(kept) for kept in times]
    apart = float((results[0] - results[1]).abs().max())
    table.add_row(name, *(f"{one:.1f}" for one in medians), f"{medians[1] / medians[0]:.1f}", f"{apart:.1e}")


def main() -> None:
    """Print the table; who is not installed, or does not run, is said."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the rivals' own, of things that torch has deprecated since
    torch.set_num_threads(1)
    torch.manual_seed(1)
    table = Table("forward and backward", "regard ms", "rival ms", "ratio", "largest difference")
    rows: dict[str, Callable[[], Pair]] = {
        "CRF likelihood, pytorch-crf": compare_crf,
        "Viterbi (forward), pytorch-crf": compare_viterbi,
        "chain marginals, torch-struct": compare_chain,
        "projective trees, torch-struct (many roots)": lambda: compare_trees(True),
        "non-projective trees, torch-struct": lambda: compare_trees(False),
    }
    for name, make in rows.items():
        try:
            measure(name, make(), options.rounds, table)
        except Exception as error:  # whatever an old library does
            table.add_row(name, "", "", "", f"{type(error).__name__}: {error}"[:60])
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
