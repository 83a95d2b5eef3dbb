"""Our decoding against CTranslate2's, of one trained run: how many answers are the same, and how fast each is.

    python benchmarks/engine.py RUN sentences.txt[.gz] [--lines 1000] [--rounds 3]

The two take turns, so that both meet the same machine.
"""

import argparse
import gzip
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from regard.inference.load import load
from regard.inference.predictor import Predictor

BEAMS = (1, 5)


def lines(path: Path, count: int) -> list[str]:
    """The first lines of a text file."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [line.strip() for line, _ in zip(file, range(count), strict=False)]


def turn(predictor: Predictor, texts: list[str], beam: int) -> tuple[list[str], list[float], int, float]:
    """Texts, scores, tokens and seconds of one engine's answers."""
    settings = predictor.config.decode.model_copy(update={"beam_size": beam})
    began = time.perf_counter()
    answers = predictor.predict(texts, settings=settings)
    seconds = time.perf_counter() - began
    tokens = sum(len(answer[0].tokens) for answer in answers)
    return [answer[0].text for answer in answers], [answer[0].score for answer in answers], tokens, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantized", type=Path, help="a folder of `regard export`, measured too")
    wishes = parser.parse_args()
    texts = lines(wishes.file, wishes.lines)
    contenders = {
        "torch": load(wishes.run, (), "cpu", "torch"),
        "CTranslate2": load(wishes.run, (), "cpu", "ctranslate2"),
    }
    if wishes.quantized:
        contenders[f"CTranslate2, {wishes.quantized.name}"] = load(wishes.quantized, (), "cpu", "ctranslate2")
    table = Table("beam", "engine", "same answers", "largest difference of their scores", "tokens/s", "least", "most")
    for beam in BEAMS:
        found: dict[str, list[tuple[list[str], list[float], int, float]]] = {name: [] for name in contenders}
        for _ in range(wishes.rounds):
            for name, predictor in contenders.items():
                found[name].append(turn(predictor, texts, beam))
        ours, scores = found["torch"][0][:2]
        for name, turns in found.items():
            same = [one == other for one, other in zip(ours, turns[0][0], strict=True)]
            apart = max(abs(a - b) for a, b, equal in zip(scores, turns[0][1], same, strict=True) if equal)
            speeds = sorted(tokens / seconds for _, _, tokens, seconds in turns)
            numbers = [f"{speed:,.0f}" for speed in (speeds[len(speeds) // 2], speeds[0], speeds[-1])]
            table.add_row(str(beam), name, f"{sum(same):,} of {len(same):,}", f"{apart:.1e}", *numbers)
            if name == "CTranslate2":
                for one, other in [pair for pair in zip(ours, turns[0][0], strict=True) if pair[0] != pair[1]][:10]:
                    print(f"beam {beam}: {one}\n        {other}")
    console = Console(width=120)
    console.print(f"{wishes.run.name}, {len(texts):,} lines of {wishes.file.name}, {torch.get_num_threads()} threads")
    console.print(table)


if __name__ == "__main__":
    main()
