"""Training speed of regard and of transformers' MarianMTModel, in target tokens a second, against this machine's roof.

Both have the same sizes and get the same batches, loss, optimizer, clipping and threads. Every figure comes from a
process of its own, in turns: regard's trainer changes how memory is allocated, which would speed the rival too, and a
processor that announces bfloat16 instructions it may not run kills whoever uses them.

    REGARD_DATA=... python benchmarks/train.py --rounds 3 --seconds 20

Without $REGARD_DATA the ids are random, their lengths those of Multi30k.
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from regard.config.model import TransformerConfig
from regard.config.run import TrainConfig
from regard.config.toml import read
from regard.data.batching import Batch, Row, collate, plan_epoch
from regard.data.vocabulary import BOS, EOS, PAD
from regard.tasks.seq2seq import Transformer
from regard.training.device import keep_memory
from regard.training.prepare import prepare
from regard.training.trainer import accumulate_gradients, clip_gradient, make_optimizer

SIZE, FEEDFORWARD, HEADS, LAYERS, VOCABULARY, DROPOUT = 256, 1024, 4, 3, 8000, 0.1
TRAIN = TrainConfig(batch_tokens=4096, learning_rate=1e-4, label_smoothing=0.1, clip_norm=1.0)
CONTENDERS = [
    "regard float32",
    "transformers float32 sdpa",
    "transformers float32 eager",
    "regard bfloat16",
    "transformers bfloat16 sdpa",
    "transformers bfloat16 eager",
]
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


# --- the work --------------------------------------------------------------------------------------------------------


def make_batches(count: int) -> list[Batch]:
    """Batches of Multi30k in a joint vocabulary, or of random ids."""
    if "REGARD_DATA" in os.environ:
        pairs = prepare(read("multi30k", [f"text.source.size={VOCABULARY}"])).rows
    else:
        rng = random.Random(1)

        def ids(length: float) -> list[int]:
            return rng.choices(range(EOS + 1, VOCABULARY), k=min(60, max(4, round(length))))

        lengths = [(length := rng.lognormvariate(2.6, 0.3), length + rng.gauss(0.5, 2.7)) for _ in range(29_000)]
        pairs = [Row([*ids(source), EOS], ids(target)) for source, target in lengths]
    return [collate([pairs[i] for i in rows]) for rows in plan_epoch(pairs, TRAIN.batch_tokens, 1, 0)[:count]]


def regard_model(**changes: str) -> Transformer:
    """Ours, after the norm as Marian's."""
    sizes = {"size": SIZE, "feedforward": FEEDFORWARD, "heads": HEADS, "dropout": DROPOUT}
    layers = {"encoder_layers": LAYERS, "decoder_layers": LAYERS}
    config = TransformerConfig(kind="transformer", norm="post", **sizes, **layers, **changes)
    return Transformer(config, VOCABULARY, longest=256)


def marian_model(attention: str, **changes: float) -> nn.Module:
    """Theirs, in the same sizes, with one embedding for both sides and the output."""
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        d_model=SIZE,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FEEDFORWARD,
        decoder_ffn_dim=FEEDFORWARD,
        dropout=DROPOUT,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=EOS,
        attn_implementation=attention,
        **changes,
    )
    return MarianMTModel(config)


def regard_step(kind: torch.dtype) -> Callable[[Batch], None]:
    """One update as `regard.training.trainer.train` makes it."""
    keep_memory()
    model = regard_model().train()
    optimizer = make_optimizer(model, TRAIN)

    def step(batch: Batch) -> None:
        accumulate_gradients(model, [batch], TRAIN, kind)
        clip_gradient(optimizer, TRAIN.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def marian_step(kind: torch.dtype, attention: str) -> Callable[[Batch], None]:
    """One update of the rival."""
    model = marian_model(attention).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=TRAIN.learning_rate, betas=TRAIN.betas, fused=True)

    def step(batch: Batch) -> None:
        seen = (batch.source != PAD).long()
        with torch.autocast("cpu", kind, enabled=kind != torch.float32):
            logits = model(batch.source, seen, decoder_input_ids=batch.target, use_cache=False).logits
        wanted = batch.answer.flatten()
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), wanted, ignore_index=PAD, label_smoothing=TRAIN.label_smoothing
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), TRAIN.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- measuring -------------------------------------------------------------------------------------------------------


def roof(kind: torch.dtype) -> float:
    """The best rate of a matrix product, in operations a second."""
    best = 0.0
    for rows, inner, columns in [(4096, 256, 1024), (4096, 1024, 256), (4096, 256, 8000), (1024, 1024, 1024)]:
        left, right = torch.randn(rows, inner, dtype=kind), torch.randn(columns, inner, dtype=kind)
        for _ in range(8):
            began = time.perf_counter()
            F.linear(left, right)
            best = max(best, 2 * rows * inner * columns / (time.perf_counter() - began))
    return best


def speed(step: Callable[[Batch], None], batches: list[Batch], seconds: float) -> float:
    """Target tokens a second over whole passes through the batches, so that everybody does the same work."""
    step(batches[0])
    tokens, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for batch in batches:
            step(batch)
            tokens += batch.tokens
    return tokens / (time.perf_counter() - began)


def measure(contender: str, path: Path, seconds: float) -> float:
    """The figure of a contender, in this process."""
    who, precision, *attention = contender.split()
    kind = getattr(torch, precision)
    if who == "roof":
        return roof(kind)
    batches = [Batch(*tensors) for tensors in torch.load(path)]
    return speed(regard_step(kind) if who == "regard" else marian_step(kind, *attention), batches, seconds)


def ask(contender: str, path: Path, options: argparse.Namespace, environment: dict[str, str]) -> float | str:
    """The figure of a contender, from a process of its own; what killed it, if something did."""
    command = [sys.executable, __file__, "--contender", contender, "--data", str(path)]
    command += ["--threads", str(options.threads), "--seconds", str(options.seconds)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if run.returncode < 0:
        return str(signal.strsignal(-run.returncode)).lower()
    if run.returncode:
        return run.stderr.strip().splitlines()[-1]
    return float(json.loads(run.stdout))


def heading() -> str:
    """When, what and where: the line that a figure is kept with."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    machine = names[0] if names else platform.processor()
    return f"{time.strftime('%Y-%m-%d')}, commit {commit}, {machine}, torch {torch.__version__}"


def products(model: Transformer) -> int:
    """Weights that multiply: all matrices of the blocks, and the output's."""
    parts = [parameter for stack in (model.encoder, model.decoder) for parameter in stack.blocks.parameters()]
    return sum(part.numel() for part in parts if part.dim() == 2) + model.output.weight.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="of every contender in every round, at least")
    parser.add_argument("--batches", type=int, default=8, help="in a pass")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="contenders whose name holds this")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.contender:
        print(json.dumps(measure(options.contender, options.data, options.seconds)))
        return
    batches = make_batches(options.batches)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batches.pt"
        torch.save([tuple(batch) for batch in batches], path)
        died = ask("roof bfloat16", path, options, {})
        amx = WITHOUT_AMX if isinstance(died, str) else {}
        names = ["roof float32", "roof bfloat16", *(name for name in CONTENDERS if options.only in name)]
        figures: dict[str, list[float]] = {}
        failures = {"bfloat16, as announced": died} if isinstance(died, str) else {}
        for _ in range(options.rounds):
            for name in names:
                label = f"{name}, without AMX" if amx and "bfloat16" in name else name
                if label not in failures:
                    found = ask(name, path, options, amx if "bfloat16" in name else {})
                    if isinstance(found, str):
                        failures[label] = found
                    else:
                        figures.setdefault(label, []).append(found)
    show(figures, failures, batches, options)


def show(
    figures: dict[str, list[float]], failures: dict[str, str], batches: list[Batch], options: argparse.Namespace
) -> None:
    """The table, and the ratios that matter."""
    out = Console(highlight=False, width=100)
    ours, theirs = regard_model(), marian_model("sdpa")
    learned = [sum(part.numel() for part in model.parameters() if part.requires_grad) for model in (ours, theirs)]
    cost = 6 * products(ours)
    data = "Multi30k" if "REGARD_DATA" in os.environ else "random ids"
    tokens = statistics.mean(batch.tokens for batch in batches)
    out.print(f"{heading()}, {options.threads} threads", soft_wrap=True)
    out.print(f"{data}, {tokens:,.0f} target tokens a batch, {options.rounds} rounds of {options.seconds:g} s")
    out.print(f"parameters: regard {learned[0]:,}, transformers {learned[1]:,}; {cost / 1e6:.1f} MFLOP a token")
    for name, values in figures.items():
        if name.startswith("roof"):
            out.print(f"{name}: {statistics.median(values) / 1e9:,.0f} GF/s")
            figures[name] = [value / cost for value in values]

    def best(*words: str) -> float:
        """The fastest whose name holds all words."""
        return max((statistics.median(figures[name]) for name in figures if all(w in name for w in words)), default=0)

    table = Table("contender", "tokens/s", "least", "most", "of its roof")
    for name, values in figures.items():
        rates = [statistics.median(values), min(values), max(values)]
        top = best("roof", "bfloat16" if "bfloat16" in name else "float32")
        table.add_row(name, *(f"{rate:,.0f}" for rate in rates), f"{rates[0] / top:.0%}" if top else "")
    for name, reason in failures.items():
        table.add_row(name, reason)
    out.print(table)
    for kind in ("float32", "bfloat16", ""):
        if best("regard", kind) and best("transformers", kind):
            ratio = best("regard", kind) / best("transformers", kind)
            out.print(f"regard / the best transformers, {kind or 'any precision'}: {ratio:.2f}")


if __name__ == "__main__":
    main()
