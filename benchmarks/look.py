"""What looking costs: training speed with recording present but unused, against a model that cannot be looked at.

The first model's attentions are called directly, past torch's hooks; the second is the package's own, which can be
recorded but is not; the third is recorded in every step. The same batches, in turns, in one process.

    python benchmarks/look.py --rounds 7
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from train import TRAIN, heading, make_batches, regard_model

from regard.data.batching import Batch
from regard.explain.recorder import record
from regard.nn.attention import Attention
from regard.tasks.seq2seq import Transformer
from regard.training.device import keep_memory
from regard.training.trainer import accumulate_gradients, clip_gradient, make_optimizer


class Blind(Attention):
    """An attention that no hook can see."""

    def __call__(self, *given):  # type: ignore[no-untyped-def]
        return self.forward(*given)


def stepper(model: Transformer) -> Callable[[Batch], None]:
    """One update as the trainer makes it."""
    optimizer = make_optimizer(model.train(), TRAIN)

    def step(batch: Batch) -> None:
        accumulate_gradients(model, [batch], TRAIN, torch.float32)
        clip_gradient(optimizer, TRAIN.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def contenders() -> dict[str, Callable[[Batch], None]]:
    """Three models of the same weights."""
    made = []
    for _ in range(3):
        torch.manual_seed(1)
        made.append(regard_model())
    for module in made[0].modules():
        if isinstance(module, Attention):
            module.__class__ = Blind
    looked_at = stepper(made[2])

    def recorded(batch: Batch) -> None:
        with record(made[2]):
            looked_at(batch)

    return {"cannot be looked at": stepper(made[0]), "can be, is not": stepper(made[1]), "recorded": recorded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=4, help="in a round")
    options = parser.parse_args()
    keep_memory()
    batches, models = make_batches(options.batches), contenders()
    figures: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(options.rounds + 1):
        for name, step in models.items():
            began = time.perf_counter()
            for batch in batches:
                step(batch)
            if turn:  # the first warms up
                figures[name].append(sum(batch.tokens for batch in batches) / (time.perf_counter() - began))
    base = figures["cannot be looked at"]
    table = Table("model", "tokens/s", "least", "most", "ratio")
    for name, values in figures.items():
        ratio = statistics.median(one / other for one, other in zip(values, base, strict=True))
        table.add_row(name, *(f"{f(values):,.0f}" for f in (statistics.median, min, max)), f"{ratio:.3f}")
    out = Console(highlight=False, width=100)
    out.print(f"{heading()}, {torch.get_num_threads()} threads", soft_wrap=True)
    out.print(table)


if __name__ == "__main__":
    main()
