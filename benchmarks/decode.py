"""Decoding speed of regard, transformers' generate and CTranslate2, in output tokens a second, from the same weights.

A MarianMTModel with random weights is copied into regard and converted for CTranslate2. Everybody reads sources of 12
tokens and makes exactly 15 steps (a bias keeps <eos> away; the limit is the same), greedy and with 5 hypotheses, 64
sentences at once and one. Each has a process of its own, for two pools of threads in one process disturb each other;
the processes stay, and take short turns in which the others sleep, so that all have the same hour. CTranslate2 also has
a turn with one thread; the better of its two figures is the one to compare with. "In halves" is another form for many
sentences: two of one thread each share them, as CTranslate2's replicas and regard's `serve.workers` do. The roof is the
same matrix products without anything between them.

    python benchmarks/decode.py --rounds 8 --seconds 1
"""

import argparse
import contextlib
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import ctranslate2
import torch
import transformers
from ctranslate2.converters.transformers import BartLoader
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from train import FEEDFORWARD, SIZE, VOCABULARY, heading, marian_model, regard_model, roof

from regard.config.config import DecodeConfig
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL, UNK
from regard.inference.decoding import decode
from regard.nn.layers import Linear, settle
from regard.tasks.models import Transformer
from regard.training.device import keep_memory

SOURCE, STEPS, NEVER = 12, 15, -100.0
Translate = Callable[[Tensor, int], list[list[int]]]
"""Sources (sentences, SOURCE) and a beam -> the tokens of each output, the last one left out: it may be <eos>."""


# --- one model, three times ------------------------------------------------------------------------------------------


def random_marian() -> nn.Module:
    """The original: no special token comes out, and attention is sharp and norms are uneven, for otherwise a tied model
    of random weights repeats one token and agreement means nothing."""
    torch.manual_seed(1)
    model = marian_model("sdpa", init_std=SIZE**-0.5).eval()
    model.final_logits_bias[:, [PAD, UNK, BOS, EOS]] = NEVER
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight *= 4
            elif name.endswith("norm.weight"):
                weight.normal_()
    return model


def copied(theirs: nn.Module) -> Transformer:
    """The same model as ours."""
    ours = regard_model(positions="learned")
    pairs = [(theirs.model.shared, ours.source_embedding)]
    for stack, own in ((theirs.model.encoder, ours.encoder), (theirs.model.decoder, ours.decoder)):
        own.positions.table.data = stack.embed_positions.weight.detach().clone()
        for layer, block in zip(stack.layers, own.blocks, strict=True):
            attentions = [(layer.self_attn, block.self_attention)]
            norms = [layer.self_attn_layer_norm, layer.final_layer_norm]
            if block.cross_attention is not None:
                attentions.append((layer.encoder_attn, block.cross_attention))
                norms.insert(1, layer.encoder_attn_layer_norm)
            for attention, part in attentions:
                three = [attention.q_proj, attention.k_proj, attention.v_proj]
                part.maps.weight.data = torch.cat([each.weight.detach() for each in three])
                part.maps.bias.data = torch.cat([each.bias.detach() for each in three])
                pairs.append((attention.out_proj, part.output))
            pairs += [(layer.fc1, block.feedforward.widen), (layer.fc2, block.feedforward.narrow)]
            pairs += [(norm, residual.norm) for norm, residual in zip(norms, block.residuals, strict=True)]
    for other, part in pairs:
        part.load_state_dict(other.state_dict())
    ours.output.bias.data = theirs.final_logits_bias[0].detach().clone()
    keep_memory()  # as `regard.load` does; it serves the whole process, so the others too
    settle(ours)
    return ours.eval()


def converted(theirs: nn.Module, folder: str) -> None:
    """The same model as CTranslate2's; tokens are called by their numbers."""
    theirs.config.normalize_before = theirs.config.normalize_embedding = False
    names = [*SPECIAL, *map(str, range(len(SPECIAL), VOCABULARY))]
    with torch.no_grad():
        spec = BartLoader().get_model_spec(theirs)
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIAL[UNK], SPECIAL[BOS], SPECIAL[EOS]
    spec.config.decoder_start_token = SPECIAL[BOS]
    spec.validate()
    spec.optimize()
    spec.save(folder)


# --- three ways to decode it -----------------------------------------------------------------------------------------


def with_regard(model: Transformer) -> Translate:
    def translate(source: Tensor, beam: int) -> list[list[int]]:
        config = DecodeConfig(beam=beam, length_penalty=1.0, max_ratio=0, max_extra=STEPS - 1)
        found = decode(model, source, torch.full((len(source),), SOURCE), config, most=STEPS)
        return [hypotheses[0].tokens for hypotheses in found]

    return translate


def with_transformers(model: nn.Module) -> Translate:
    def translate(source: Tensor, beam: int) -> list[list[int]]:
        limits = {"min_new_tokens": STEPS, "max_new_tokens": STEPS}
        with torch.inference_mode():
            found = model.generate(
                source, attention_mask=torch.ones_like(source), num_beams=beam, do_sample=False, **limits
            )
        return found[:, 1:STEPS].tolist()

    return translate


def in_halves(translate: Translate) -> Translate:
    """Two processes of one thread each, with the same weights, that share the sentences."""
    torch.set_num_threads(1)
    processes = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))

    def both(source: Tensor, beam: int) -> list[list[int]]:
        halves = [processes.submit(half, rows.tolist(), beam) for rows in source.chunk(2)]
        return [tokens for found in halves for tokens in found.result()]

    global shared
    shared = translate
    return both


def half(rows: list[list[int]], beam: int) -> list[list[int]]:
    """What one of two processes does."""
    return shared(torch.tensor(rows), beam)


def with_ctranslate2(folder: str, kind: str, threads: int, halves: int = 1) -> Translate:
    translator = ctranslate2.Translator(folder, compute_type=kind, intra_threads=threads, inter_threads=halves)

    def translate(source: Tensor, beam: int) -> list[list[int]]:
        texts = [[*map(str, row[:-1]), SPECIAL[EOS]] for row in source.tolist()]
        limits = {
            "min_decoding_length": STEPS,
            "max_decoding_length": STEPS,
            "max_batch_size": -(-len(texts) // halves),
        }
        found = translator.translate_batch(texts, beam_size=beam, **limits)
        return [list(map(int, answer.hypotheses[0][: STEPS - 1])) for answer in found]

    return translate


def products_alone(model: Transformer) -> Translate:
    """The roof: every matrix product of the work and nothing else, large matrices laid out as regard has them. For one
    sentence regard makes fewer products."""
    crosses = [block.cross_attention.maps for block in model.decoder.blocks]
    once = [part.weight for part in model.encoder.modules() if isinstance(part, nn.Linear)]
    once += [part.weight[SIZE:] for part in crosses]
    often = [part.weight for part in model.decoder.modules() if isinstance(part, nn.Linear) and part not in crosses]
    often += [part.weight[:SIZE] for part in crosses] + [model.output.weight]
    parts = nn.ModuleList(Linear(*weight.shape[::-1]) for weight in (*once, *often)).requires_grad_(False)
    settle(parts)

    def translate(source: Tensor, beam: int) -> list[list[int]]:
        with torch.inference_mode():
            groups = (parts[: len(once)], source.numel(), 1), (parts[len(once) :], len(source) * beam, STEPS)
            for group, rows, times in groups:
                inputs = {width: torch.ones(rows, width) for width in (SIZE, FEEDFORWARD)}
                for part in [*group] * times:
                    part(inputs[part.in_features])
        return []

    return translate


# --- measuring -------------------------------------------------------------------------------------------------------


def speed(translate: Translate, source: Tensor, beam: int, seconds: float) -> float:
    """Output tokens a second."""
    translate(source, beam)
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        translate(source, beam)
        calls += 1
    return calls * len(source) * STEPS / (time.perf_counter() - began)


def agreement(contenders: dict[str, Translate], texts: Tensor) -> str:
    """Greedy outputs that are the same. With a beam they need not be: an <eos> that is forced at the limit costs its
    log-probability in regard, nothing in transformers, and CTranslate2 forces none."""
    answers = {name: translate(texts, 1) for name, translate in contenders.items()}
    ours = answers["regard"]
    shares = [
        f"{name} {sum(map(list.__eq__, ours, found)) / len(ours):.0%}"
        for name, found in answers.items()
        if found is not ours
    ]
    kinds = len({token for answer in ours for token in answer})
    return f"greedy outputs ({kinds} different tokens) that are regard's: {', '.join(shares)}"


def sources() -> Tensor:
    """64 sentences."""
    drawn = torch.randint(len(SPECIAL), VOCABULARY, (64, SOURCE), generator=torch.Generator().manual_seed(2))
    drawn[:, -1] = EOS
    return drawn


def contender(name: str, folder: str, threads: int) -> Translate:
    """Somebody by name; `folder` holds the model for CTranslate2."""
    who, _, how = name.partition(", ")
    if who.startswith("CTranslate2"):
        return with_ctranslate2(folder, who.split()[1], 1 if how else threads, 2 if how == "in halves" else 1)
    marian = random_marian()
    if who == "transformers":
        return with_transformers(marian)
    if who == "products alone":
        return products_alone(copied(marian))
    return in_halves(with_regard(copied(marian))) if how else with_regard(copied(marian))


def serve(name: str, folder: str, options: argparse.Namespace) -> None:
    """In a process of its own: tokens a second in each case that standard input names, as it does."""
    translate = contender(name, folder, options.threads)
    for line in sys.stdin:
        size, beam = CASES[line.rstrip()]
        print(speed(translate, sources()[:size], beam, options.seconds), flush=True)


def take_turns(names: list[str], folder: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """The median of every contender's tokens a second in every case."""
    figures: dict[str, list[list[float]]] = {name: [[] for _ in CASES] for name in names}
    with contextlib.ExitStack() as stack:
        processes = {}
        for name in names:
            command = [sys.executable, __file__, "--contender", name, "--folder", folder]
            command += ["--threads", str(options.threads), "--seconds", str(options.seconds)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes[name] = stack.enter_context(process)
        for _ in range(1 + options.rounds):
            for number, case in enumerate(CASES):
                for name, process in processes.items():
                    print(case, file=process.stdin, flush=True)
                    figures[name][number].append(float(process.stdout.readline()))
        for process in processes.values():
            process.stdin.close()
    # the first round warms up
    return {name: [statistics.median(rounds[1:]) for rounds in cases] for name, cases in figures.items()}


CASES = {f"{'greedy' if beam == 1 else f'beam {beam}'}, {size}": (size, beam) for size in (64, 1) for beam in (1, 5)}
CONTENDERS = [
    "products alone",
    "regard",
    "transformers",
    "CTranslate2 float32",
    "CTranslate2 float32, 1 thread",
    "CTranslate2 int8",
    "CTranslate2 int8, 1 thread",
    "regard, in halves",
    "CTranslate2 float32, in halves",
]
COMPARED = [
    ("regard", "products alone"),
    ("regard", "transformers"),
    ("regard", "CTranslate2 float32"),
    ("regard", "CTranslate2 int8"),
    ("regard, in halves", "CTranslate2 float32, in halves"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1, help="of every contender in every case and round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="contenders whose name holds one of these, separated by |")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="transformers")
    if options.contender:
        serve(options.contender, options.folder, options)
        return
    out = Console(highlight=False, width=100)
    names = [name for name in CONTENDERS if any(part in name for part in options.only.split("|"))]
    with tempfile.TemporaryDirectory() as folder:
        converted(random_marian(), folder)
        out.print(f"{heading()}, {options.threads} threads, {roof(torch.float32) / 1e9:,.0f} GF/s", soft_wrap=True)
        out.print(agreement({name: contender(name, folder, 1) for name in CONTENDERS[1:4]}, sources()))
        medians = take_turns(names, folder, options)
    table = Table("tokens/s", *CASES)
    for name, values in medians.items():
        table.add_row(name, *(f"{value:,.0f}" for value in values))
    table.add_section()
    for one, other in COMPARED:
        group = [medians[name] for name in (other, f"{other}, 1 thread") if name in medians]
        if group and one in medians:
            best = [max(values) for values in zip(*group, strict=True)]
            ratios = [ours / theirs for ours, theirs in zip(medians[one], best, strict=True)]
            named = f"{one} / {other}" + ", its best" * (len(group) > 1)
            table.add_row(named, *(f"{ratio:.2f}" for ratio in ratios))
    out.print(table)


if __name__ == "__main__":
    main()
