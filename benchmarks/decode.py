"""Decoding speed, in output tokens a second, from the same weights: `regard.load(run).predict` with the engine that
`auto` chooses and with our own, CTranslate2's own API in every configuration of replicas and threads, and transformers'
generate.

A run of random weights is made (3+3 layers, 256 wide, 8,000 words), exported to CTranslate2 and to transformers.
Everybody answers sources of 12 tokens with exactly 15 (<eos> never comes; the limit is the same), greedily and with 5
hypotheses, 64 sentences at once and one. regard gets texts and gives texts; the others get and give tokens. Each has a
process of its own, for two pools of threads in one process disturb each other; the processes stay, and take short turns
in which the others sleep, so that all have the same hour. The best figure of CTranslate2 in each cell is the one to
compare with.

    python benchmarks/decode.py --rounds 8 --seconds 1
"""

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from train import heading, roof

SOURCE, STEPS, VOCABULARY = 12, 15, 8000
Translate = Callable[[list[str], int], Any]
"""Sources and a beam size -> answers."""
CASES = {f"{'greedy' if beam == 1 else f'beam {beam}'}, {size}": (size, beam) for size in (64, 1) for beam in (1, 5)}
CONTENDERS = [
    *("regard auto float32", "regard auto int8", "regard torch"),
    *(f"CTranslate2 {kind} {form}" for kind in ("float32", "int8") for form in ("1x2", "1x1", "2x1")),
    "transformers",
]
"""CTranslate2's forms are replicas x threads."""


def make_run(folder: Path) -> Path:
    """A run of random weights whose outputs never end. Attention is sharp and norms are uneven, for otherwise a tied
    model of random weights repeats one token and agreement means nothing."""
    from regard.config.run import Config
    from regard.data.vocabulary import BOS, EOS, PAD, UNK, Vocabularies, Vocabulary
    from regard.tasks import make_task
    from regard.training.checkpoint import create_run, get_weights, save_weights

    sizes = {"size": 256, "feedforward": 1024, "heads": 4, "encoder_layers": 3, "decoder_layers": 3}
    form = {"norm": "post", "positions": "sinusoidal", "activation": "silu"}  # Marian's
    decode = {"max_ratio": 0.0, "max_extra": STEPS, "length_penalty": 1.0}
    config = Config.model_validate(
        {
            "data": {"kind": "tsv", "train": ()},
            "text": {"source": {"kind": "word"}, "max_length": 64},
            "model": {"kind": "transformer", **sizes, **form},
            "decode": decode,
        }
    )
    vocabulary = Vocabulary.learn([f"w{number}" for number in range(4, VOCABULARY)], config.text.source)
    vocabularies = Vocabularies(vocabulary, vocabulary)
    torch.manual_seed(1)
    model: Any = make_task(config, vocabularies).build()
    with torch.no_grad():
        model.output.bias[[PAD, UNK, BOS, EOS]] = -100.0
        for name, weight in model.named_parameters():
            if name.endswith("projection.weight"):
                weight[: 2 * weight.shape[1]] *= 4
            elif "norm.weight" in name:
                weight.normal_()
    create_run(folder, config, vocabularies, {})
    save_weights(folder / "model.safetensors", get_weights(model), 0)
    return folder


def make_sources() -> list[str]:
    """64 sentences."""
    rng = random.Random(2)
    return [" ".join(f"w{rng.randrange(4, VOCABULARY)}" for _ in range(SOURCE - 1)) for _ in range(64)]


# --- contenders ------------------------------------------------------------------------------------------------------


def with_regard(run: Path, engine: str, quantization: str) -> Translate:
    import regard

    predictor = regard.load(run, [f"decode.quantization={quantization}"], "cpu", engine)
    settings = {
        beam: predictor.config.decode.model_copy(update={"beam_size": beam}) for beam in {b for _, b in CASES.values()}
    }
    return lambda texts, beam: [answers[0].text for answers in predictor.predict(texts, settings=settings[beam])]


def with_ctranslate2(folder: Path, quantization: str, replicas: int, threads: int) -> Translate:
    import ctranslate2

    translator = ctranslate2.Translator(
        str(folder / f"ctranslate2-{quantization}"), inter_threads=replicas, intra_threads=threads
    )
    limits = {"min_decoding_length": STEPS, "max_decoding_length": STEPS}

    def translate(texts: list[str], beam: int) -> list[str]:
        tokens = [[*text.split(), "<eos>"] for text in texts]
        size = -(-len(tokens) // replicas)
        found = translator.translate_batch(tokens, beam_size=beam, max_batch_size=size, **limits)
        return [" ".join(one.hypotheses[0]) for one in found]

    return translate


def with_transformers(folder: Path) -> Translate:
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "transformers").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "transformers")

    def translate(texts: list[str], beam: int) -> list[str]:
        ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
        limits = {"min_new_tokens": STEPS, "max_new_tokens": STEPS, "num_beams": beam, "do_sample": False}
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), forced_eos_token_id=None, **limits)
        return [tokenizer.decode(row, skip_special_tokens=True) for row in found]

    return translate


def make_contender(name: str, folder: Path) -> Translate:
    """Somebody by name, for the models in a folder."""
    who, *how = name.split()
    if who == "regard":
        return with_regard(folder / "run", how[0], how[1] if len(how) > 1 else "float32")
    if who == "CTranslate2":
        return with_ctranslate2(folder, how[0], *map(int, how[1].split("x")))
    return with_transformers(folder)


# --- measuring -------------------------------------------------------------------------------------------------------


def speed(translate: Translate, sources: list[str], beam: int, seconds: float) -> float:
    """Output tokens a second."""
    translate(sources, beam)
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        translate(sources, beam)
        calls += 1
    return calls * len(sources) * STEPS / (time.perf_counter() - began)


def serve(name: str, folder: Path, seconds: float) -> None:
    """In a process of its own: tokens a second in each case that standard input names, as it does."""
    translate = make_contender(name, folder)
    for line in sys.stdin:
        size, beam = CASES[line.rstrip()]
        print(speed(translate, make_sources()[:size], beam, seconds), flush=True)


def take_turns(names: list[str], folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """The median of every contender's tokens a second in every case."""
    figures: dict[str, list[list[float]]] = {name: [[] for _ in CASES] for name in names}
    with contextlib.ExitStack() as stack:
        processes = {}
        for name in names:
            command = [sys.executable, __file__, "--contender", name, "--folder", str(folder)]
            command += ["--seconds", str(options.seconds)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes[name] = stack.enter_context(process)
        for _ in range(1 + options.rounds):
            for number, case in enumerate(CASES):
                for name, process in processes.items():
                    print(case, file=process.stdin, flush=True)
                    assert process.stdout is not None
                    figures[name][number].append(float(process.stdout.readline()))
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()
    # the first round warms up
    return {name: [statistics.median(rounds[1:]) for rounds in cases] for name, cases in figures.items()}


def agreement(folder: Path) -> str:
    """Greedy answers of CTranslate2's own API and of transformers that are those of our own engine."""
    answers = {
        name: make_contender(name, folder)(make_sources(), 1)
        for name in ("regard torch", "regard auto float32", "CTranslate2 float32 1x2", "transformers")
    }
    ours = answers.pop("regard torch")
    shares = [f"{name} {sum(map(str.__eq__, ours, found)) / len(ours):.0%}" for name, found in answers.items()]
    return f"greedy answers ({len(set(ours))} different) that are those of our own engine: {', '.join(shares)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1, help="of every contender in every case and round")
    parser.add_argument("--only", default="", help="contenders whose name holds one of these, separated by |")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="transformers")
    if options.contender:
        serve(options.contender, options.folder, options.seconds)
        return
    from regard.formats.ctranslate2 import export_ctranslate2
    from regard.formats.huggingface_export import export_huggingface

    out = Console(highlight=False, width=100)
    names = [name for name in CONTENDERS if any(part in name for part in options.only.split("|"))]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run = make_run(folder / "run")
        for kind in ("float32", "int8"):
            export_ctranslate2(run, folder / f"ctranslate2-{kind}", kind)
        export_huggingface(run, folder / "transformers")
        out.print(f"{heading()}, {os.cpu_count()} cores, {roof(torch.float32) / 1e9:,.0f} GF/s", soft_wrap=True)
        out.print(agreement(folder), soft_wrap=True)
        medians = take_turns(names, folder, options)
    table = Table("tokens/s", *CASES)
    for name, values in medians.items():
        table.add_row(name, *(f"{value:,.0f}" for value in values))
    table.add_section()
    for kind in ("float32", "int8"):
        ours, theirs = f"regard auto {kind}", [one for name, one in medians.items() if f"CTranslate2 {kind}" in name]
        if ours in medians and theirs:
            best = [max(values) for values in zip(*theirs, strict=True)]
            ratios = [one / other for one, other in zip(medians[ours], best, strict=True)]
            table.add_row(f"{ours} / CTranslate2's best", *(f"{ratio:.2f}" for ratio in ratios))
    out.print(table)


if __name__ == "__main__":
    main()
