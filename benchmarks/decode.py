"""Decoding speed of regard, transformers' generate and CTranslate2, in output tokens a second, from the same weights.

A MarianMTModel with random weights is copied into regard and converted for CTranslate2. Everybody reads sources of 12
tokens and makes exactly 15 steps (a bias keeps <eos> away; the limit is the same), greedy and with 5 hypotheses, 64
sentences at once and one, in turns, each in a process of its own: two pools of threads in one process disturb each
other. CTranslate2 also has a turn with one thread; the better of its two figures is the one to compare with. The roof
is the same matrix products without anything between them.

    python benchmarks/decode.py --rounds 3 --seconds 4
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import ctranslate2
import torch
import transformers
from ctranslate2.converters.transformers import BartLoader
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from train import FEEDFORWARD, SIZE, VOCABULARY, heading, marian_model, regard_model, roof

from regard.config import DecodeConfig
from regard.decode import decode
from regard.device import keep_memory
from regard.layers import Linear, settle
from regard.models import Transformer
from regard.text import BOS, EOS, PAD, SPECIAL, UNK

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


def with_ctranslate2(folder: str, kind: str, threads: int) -> Translate:
    translator = ctranslate2.Translator(folder, compute_type=kind, intra_threads=threads, inter_threads=1)

    def translate(source: Tensor, beam: int) -> list[list[int]]:
        texts = [[*map(str, row[:-1]), SPECIAL[EOS]] for row in source.tolist()]
        limits = {"min_decoding_length": STEPS, "max_decoding_length": STEPS}
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
    if name.startswith("CTranslate2"):
        return with_ctranslate2(folder, name.split()[1].strip(","), 1 if name.endswith("1 thread") else threads)
    marian = random_marian()
    if name == "transformers":
        return with_transformers(marian)
    return with_regard(copied(marian)) if name == "regard" else products_alone(copied(marian))


def measure(name: str, folder: str, options: argparse.Namespace) -> list[float]:
    """Tokens a second in every case, in this process."""
    translate = contender(name, folder, options.threads)
    return [speed(translate, sources()[:size], beam, options.seconds) for size, beam in CASES.values()]


def ask(name: str, folder: str, options: argparse.Namespace) -> list[float]:
    """Tokens a second in every case, from a process of its own."""
    command = [sys.executable, __file__, "--contender", name, "--folder", folder]
    command += ["--threads", str(options.threads), "--seconds", str(options.seconds)]
    found: list[float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


CASES = {f"{'greedy' if beam == 1 else f'beam {beam}'}, {size}": (size, beam) for size in (64, 1) for beam in (1, 5)}
CONTENDERS = [
    "products alone",
    "regard",
    "transformers",
    "CTranslate2 float32",
    "CTranslate2 float32, 1 thread",
    "CTranslate2 int8",
    "CTranslate2 int8, 1 thread",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of every contender in every case and round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="contenders whose name holds one of these, separated by |")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="transformers")
    if options.contender:
        print(json.dumps(measure(options.contender, options.folder, options)))
        return
    out = Console(highlight=False, width=100)
    names = [name for name in CONTENDERS if any(part in name for part in options.only.split("|"))]
    figures: dict[str, list[list[float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        converted(random_marian(), folder)
        out.print(f"{heading()}, {options.threads} threads, {roof(torch.float32) / 1e9:,.0f} GF/s", soft_wrap=True)
        out.print(agreement({name: contender(name, folder, 1) for name in CONTENDERS[1:4]}, sources()))
        for _ in range(options.rounds):
            for name in names:
                figures[name].append(ask(name, folder, options))
    medians = {name: list(map(statistics.median, zip(*rounds, strict=True))) for name, rounds in figures.items()}
    table = Table("tokens/s", *CASES)
    for name, values in medians.items():
        table.add_row(name, *(f"{value:,.0f}" for value in values))
    table.add_section()
    for rival in ("products alone", "transformers", "CTranslate2 float32", "CTranslate2 int8"):
        group = [values for name, values in medians.items() if name.startswith(rival)]
        if group and "regard" in medians:
            best = [max(values) for values in zip(*group, strict=True)]
            ratios = [ours / theirs for ours, theirs in zip(medians["regard"], best, strict=True)]
            table.add_row(f"regard / {rival}" + ", its best" * (len(group) > 1), *(f"{ratio:.2f}" for ratio in ratios))
    out.print(table)


if __name__ == "__main__":
    main()
