"""What long attention gains on this machine: against the fused full attention, and against transformers' BigBird.

Layers of d 256 with 4 heads take turns, batch 1, in one process; a time is the fastest of several rounds, and the ratio
is theirs over ours, so more than 1 is faster. BigBird of transformers has no output projection inside, ours has: it
does that much more. The first lines are one pass forward and backward at 65,536 tokens with the most memory that the
process had; one map of a plain n x n computation alone would take 64 GB there. `regard cost` measures growth by length.

    python benchmarks/cost.py --threads 2
"""

import argparse
import functools
import resource
import time
from collections.abc import Callable, Mapping

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from train import heading, roof

from regard.attention.sparse import Pattern
from regard.evaluation.cost import LAYERS, SelfAttention, Sizes, run_layer
from regard.training.device import keep_memory

SIZES = Sizes()
LONGEST = 65_536
Runs = Mapping[str, Callable[[], None]]


class RivalBigBird(nn.Module):
    """The block-sparse attention of transformers: blocks of 64, 3 random ones, and its 2 global ones."""

    def __init__(self, n: int) -> None:
        from transformers import BigBirdConfig
        from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

        super().__init__()
        config = BigBirdConfig(
            hidden_size=SIZES.size,
            num_attention_heads=SIZES.heads,
            block_size=SIZES.block,
            num_random_blocks=SIZES.random_blocks,
            max_position_embeddings=n,
        )
        self.attention = BigBirdBlockSparseAttention(config, seed=0).eval()
        blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, n), SIZES.block)
        self.masks = {"band_mask": band, "from_mask": rows, "to_mask": columns}
        self.masks |= {"from_blocked_mask": blocked, "to_blocked_mask": blocked}

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, **self.masks)[0]
        return found


def take_turns(runs: Runs, rounds: int) -> dict[str, float]:
    """The fastest of several rounds of each, in seconds."""
    best = dict.fromkeys(runs, float("inf"))
    for number in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if number:  # the first is for what is made once
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def compare_layers(layers: Mapping[str, nn.Module], n: int, rounds: int, table: Table) -> None:
    """Time layers in turns, forward alone and with backward; the first is what the others are compared with."""
    x = torch.randn(1, n, SIZES.size, requires_grad=True)
    for learn in (False, True):
        runs = {name: functools.partial(run_layer, layer, x, learn=learn) for name, layer in layers.items()}
        times = take_turns(runs, rounds)
        first = next(iter(times.values()))
        for name, seconds in times.items():
            what = "forward and backward" if learn else "forward"
            table.add_row(f"{n:,}", what, name, f"{1000 * seconds:,.0f}", f"{first / seconds:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()  # as every training does, for all layers alike
    out = Console(width=120)
    out.print(f"{heading()}, {options.threads} threads, {roof(torch.float32) / 1e9:,.0f} GF/s", soft_wrap=True)
    for name in ("linformer", "bigbird", "window"):
        x = torch.randn(1, LONGEST, SIZES.size, requires_grad=True)
        begin = time.perf_counter()
        run_layer(LAYERS[name].make(SIZES, LONGEST), x, learn=True)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        took = time.perf_counter() - begin
        out.print(f"{name}: {LONGEST:,} tokens, forward and backward: {took:.1f} s; {most:.1f} GB so far at most")
    table = Table("tokens", "pass", "layer", "ms", "times as fast as the first")
    names = ("self-attention", "window", "linformer", "bigbird")
    for n in (4096, 16_384):
        compare_layers({name: LAYERS[name].make(SIZES, n) for name in names}, n, options.rounds, table)
    for n in (4096, 16_384):
        ours = SelfAttention(SIZES, pattern=Pattern(SIZES.block, 1, None, 2, SIZES.random_blocks))
        layers = {"transformers' BigBird": RivalBigBird(n), "bigbird, 2 global blocks": ours}
        compare_layers(layers, n, options.rounds, table)
    out.print(table)


if __name__ == "__main__":
    main()
