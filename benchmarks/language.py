"""Language modelling: nanoGPT's CPU recipe against a plain torch loop of the same model, and what the cache saves.

Tiny Shakespeare by characters, 4 layers, 128 wide, context 64, 12 rows a batch, 2,000 steps, no dropout, nanoGPT's rate
and embeddings. Both train in processes of their own, in turns, with the same threads, timed from the making of the
model to its validation loss; the loop has no log and no checkpoints in its time, regard has both in its own. The loop's
time without validation is shown, too.

What the cache saves is the time of the token after 512, for the recipe, for nanoGPT's larger model and for the size of
GPT-2; with `--run`, for that run's model, such as an imported one.

    REGARD_DATA=... python benchmarks/language.py --rounds 2 --steps 2000
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from regard.config.run import Config
from regard.config.toml import read
from regard.data.vocabulary import Vocabularies, Vocabulary
from regard.evaluation.evaluate import measure_nats
from regard.evaluation.fit import fit
from regard.inference.load import load
from regard.tasks import make_task
from regard.tasks.language_model import LanguageModel
from regard.training.device import keep_memory
from regard.training.prepare import prepare, start_run

RATE, LEAST, WARMUP, ROWS, CONTEXT, SIZE, HEADS, LAYERS = 1e-3, 1e-4, 100, 12, 64, 128, 4, 4
NANO = [
    f"text.max_length={CONTEXT}",
    *(f"model.size={SIZE}", f"model.feedforward={4 * SIZE}", f"model.heads={HEADS}", f"model.layers={LAYERS}"),
    *(
        "model.dropout=0",
        "model.activation=gelu",
        "model.positions=learned",
        "model.embedding_scale=false",
        f"train.batch_tokens={ROWS * CONTEXT}",
    ),
    *(f"train.learning_rate={RATE}", f"train.warmup={WARMUP}", "train.precision=float32"),
]
VOCABULARY = 69
"""The characters of the recipe."""
SIZES = {
    "the recipe (3 layers, 256 wide)": [],
    "nanoGPT's larger model (6 layers, 384 wide)": [
        *("model.size=384", "model.feedforward=1536", "model.layers=6", "model.heads=6", "model.activation=gelu")
    ],
    "GPT-2's size (12 layers, 768 wide)": [
        *("model.size=768", "model.feedforward=3072", "model.layers=12", "model.heads=12", "model.activation=gelu")
    ],
}


class Block(nn.Module):
    """One layer as anybody would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.maps, self.mix = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.widen, self.narrow = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        rows, n, _ = x.shape
        parts = self.maps(self.first(x)).split(SIZE, dim=2)
        query, key, value = (part.view(rows, n, HEADS, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(rows, n, SIZE))
        return x + self.narrow(F.gelu(self.widen(self.second(x))))


class Plain(nn.Module):
    """The model of the recipe, its output tied to the embedding."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, SIZE), nn.Embedding(CONTEXT, SIZE)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(SIZE)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.norm(self.blocks(x)) @ self.words.weight.T
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def rate(step: int, steps: int) -> float:
    """Warm-up, then a cosine."""
    if step < WARMUP:
        return RATE * step / WARMUP
    return LEAST + (RATE - LEAST) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


def config_of(steps: int) -> Config:
    """The recipe of nanoGPT in our settings."""
    return read("shakespeare", [*NANO, f"train.steps={steps}", f"train.validate_every={steps}"])


def plain(steps: int) -> dict[str, float]:
    """Train the plain loop; its loss on the validation text in windows that do not overlap, and the seconds of both."""
    prepared = prepare(config_of(steps))
    text, held = (
        torch.tensor(prepared.task.source.encode(splits[0].target).ids)
        for splits in (prepared.splits.train, prepared.splits.valid)
    )
    torch.manual_seed(1)
    began = time.perf_counter()
    model = Plain(prepared.task.source.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    for step in range(1, steps + 1):
        begins = torch.randint(len(text) - CONTEXT - 1, (ROWS, 1))
        rows = text[begins + torch.arange(CONTEXT + 1)]
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    learned = time.perf_counter() - began
    windows = held[: (len(held) - 1) // CONTEXT * CONTEXT + 1]
    fed, wanted = windows[:-1].view(-1, CONTEXT), windows[1:].view(-1, CONTEXT)
    with torch.inference_mode():
        losses = [float(model(*pair)) * len(pair[0]) for pair in zip(fed.split(32), wanted.split(32), strict=True)]
    return {"seconds": time.perf_counter() - began, "learned": learned, "nats": sum(losses) / len(fed)}


def ours(steps: int) -> dict[str, float]:
    """Train with regard, everything included; then its loss on all of the validation text."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = start_run(config_of(steps), Path(folder))
        began = time.perf_counter()
        fit(prepared, Path(folder), lambda event: None, device="cpu")
        seconds = time.perf_counter() - began
        valid = prepared.splits.valid
        nats = measure_nats(load(folder, device="cpu"), valid).figures(range(len(valid)))["nats"]
    return {"seconds": seconds, "nats": nats}


def writer(changes: Sequence[str]) -> LanguageModel:
    """A language model of some size, its weights random, for texts of up to 1,024 characters."""
    config = read("shakespeare", ["text.max_length=1024", *changes])
    letters = Vocabulary.learn(map(chr, range(256, 256 + VOCABULARY - 4)), config.text.source)
    torch.manual_seed(1)
    model = make_task(config, Vocabularies(letters, letters)).build().eval()
    assert isinstance(model, LanguageModel)
    return model


@torch.inference_mode()
def whole(model: LanguageModel, count: int = 512) -> str:
    """The likeliest text of so many tokens from its beginning, by steps and by reading everything again, in words."""
    begin = [5, 6, 7]
    began = time.perf_counter()
    state, written = model.start(torch.tensor([begin]), torch.tensor([len(begin)])), begin[:]
    for _ in range(count):
        scores, state = model.step(torch.tensor(written[-1:]), state)
        written.append(int(scores.argmax()))
    quick = time.perf_counter() - began
    began, read = time.perf_counter(), begin[:]
    for _ in range(count):
        again = model.output(model.decoder(model.source_embedding(torch.tensor([read])))[0][:, -1])
        read.append(int(again.argmax()))
    slow = time.perf_counter() - began
    return (
        f"all {count} tokens from the first on: {quick:.2f} s with the cache, {slow:.2f} s without, "
        f"{slow / quick:.1f} times as long; the same tokens: {read == written}"
    )


@torch.inference_mode()
def at_the_end(model: LanguageModel, ids: Tensor, rounds: int = 5, count: int = 32) -> tuple[float, float]:
    """Seconds for a token behind ids (1, n): by steps with the cache, one after the other as a writer makes them, and
    by reading everything again. The medians of several rounds, in turns; the steps before are not timed, because a
    processor that has just read a long text takes a while until it is quick with small products."""
    steps, readings = [], []
    before = ids.shape[1] - count
    for _ in range(rounds):
        state = model.start(ids[:, :before], torch.tensor([before]))
        for token in ids[0, before - 1 :]:
            _, state = model.step(token[None], state)
        began = time.perf_counter()
        for _ in range(count):
            _, state = model.step(ids[:, -1], state)
        steps.append((time.perf_counter() - began) / count)
        began = time.perf_counter()
        for _ in range(4):
            model.output(model.decoder(model.source_embedding(ids))[0][:, -1])
        readings.append((time.perf_counter() - began) / 4)
    return median(steps), median(readings)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="of the two trainings; 0 measures the cache alone")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", choices=["plain", "ours"])
    parser.add_argument("--run", help="measure the cache of this run's model, and nothing else")
    options = parser.parse_args()
    if options.run:
        model = load(options.run, device="cpu").model
        assert isinstance(model, LanguageModel)
        print(saved(options.run, model))
        return
    if options.only:
        print(json.dumps({"plain": plain, "ours": ours}[options.only](options.steps)))
        return
    table = Table(
        "round", "model", "seconds", "without validation", "validation nats", title=f"{options.steps:,} steps"
    )
    totals = {"ours": 0.0, "plain": 0.0}
    for number in range(options.rounds):
        for name in ("ours", "plain") if number % 2 else ("plain", "ours"):
            found = child(name, options.steps)
            totals[name] += found["seconds"]
            before = f"{found['learned']:.1f}" if "learned" in found else ""
            table.add_row(str(number + 1), name, f"{found['seconds']:.1f}", before, f"{found['nats']:.4f}")
    if options.rounds:
        Console().print(table, f"plain / ours in time: {totals['plain'] / totals['ours']:.2f}")
    keep_memory()
    for name, changes in SIZES.items():
        model = writer(changes)
        print(saved(name, model))
        if "GPT-2" not in name:  # reading again takes minutes there
            print(whole(model))


def saved(name: str, model: LanguageModel) -> str:
    """What the cache saves at the token after 512, in words."""
    step, reading = at_the_end(model, torch.randint(4, model.output.weight.shape[0], (1, 512)))
    return (
        f"{name}: the token after 512 takes {1000 * step:.2f} ms with the cache, {1000 * reading:.2f} ms without, "
        f"{reading / step:.1f} times as long"
    )


def child(name: str, steps: int) -> dict[str, float]:
    """One figure from a process of its own."""
    command = [sys.executable, __file__, "--only", name, "--steps", str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
