"""Whether a head of a trained encoder ties a pronoun to what it stands for (E8).

    python benchmarks/coreference.py RUN [--picture docs/coreference.png]

RUN is of kind encoder, as `regard import` makes one. Every sentence has two nouns and a pronoun, and comes twice: one
word decides which of the nouns is meant, and in the other sentence of the pair it is the other noun. So whoever looks
at places alone, as "the nearest noun" does, is right half of the time. A head answers with the noun that has more
attention. The best head of many is good by luck, too: so it is chosen on some patterns and judged on the others.
"""

import argparse
import random
import re
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import regard
from regard.data.batching import pad_sources
from regard.explain.plots import open_figure
from regard.inference.predictor import Predictor

PATTERNS = [  # {a} and {b}: the nouns; {it}: the pronoun; then the words that decide for a, and for b; and nouns
    ("The {a} didn't cross the {b} because {it} was too {}.", "tired slow", "wide busy",
     "animal:street dog:river boy/he:road horse:bridge"),
    ("The {a} does not fit into the {b} because {it} is too {}.", "big large", "small narrow",
     "trophy:suitcase piano:elevator sofa:van book:bag"),
    ("The {a} broke the {b} because {it} was made of {}.", "steel iron", "glass paper",
     "ball:window hammer:vase stone:bottle"),
    ("I poured water from the {a} into the {b} until {it} was {}.", "empty drained", "full overflowing",
     "bottle:cup bucket:tank jug:bowl"),
    ("The {a} could not lift the {b} because {it} was so {}.", "weak feeble", "heavy huge",
     "boy/he:rock robot:box crane:truck"),
    ("The {a} chased the {b} because {it} was {}.", "hungry angry", "running escaping",
     "cat:mouse wolf:rabbit dog:fox"),
    ("The {a} hid from the {b} because {it} was {}.", "scared timid", "scary dangerous",
     "mouse:cat rabbit:eagle fish:shark"),
    ("The {a} ate the {b} because {it} was {}.", "hungry starving", "tasty delicious",
     "dog:cake bear:fish bird:apple"),
    ("The {a} could not see the {b} because {it} was {}.", "blind asleep", "hidden invisible",
     "lion:deer guard/he:door owl:worm"),
    ("The {a} passed the {b} because {it} was going so {}.", "fast quickly", "slowly slow",
     "car:bus train:truck bike:tractor"),
    ("We moved the {a} to the {b} because {it} was {}.", "wet frozen", "warm dry",
     "chair:kitchen plant:garage bed:hall"),
    ("The {a} was removed from the {b} because {it} was {}.", "broken dirty", "overloaded crowded",
     "box:truck bag:car chair:room"),
    ("The {a} was put on the {b} because {it} was {}.", "finished ready", "empty flat",
     "cup:table lamp:desk plate:shelf"),
    ("The {a} sank into the {b} because {it} was so {}.", "heavy dense", "soft deep",
     "stone:mud truck:sand wagon:snow"),
    ("The {a} cannot cut the {b} because {it} is too {}.", "dull blunt", "hard thick",
     "knife:bread saw:wood axe:tree"),
    ("The {a} thanked the {b} because {it} had {} help.", "received gotten", "given offered",
     "man/he:king woman/she:queen boy/he:farmer"),
    ("The {a} asked the {b} a question because {it} wanted to {}.", "learn know", "teach explain",
     "boy/he:man girl/she:woman son/he:father"),
    ("The {a} paid the {b} because {it} had {} the work.", "ordered requested", "done finished",
     "man/he:painter woman/she:maid king/he:soldier"),
    ("The {a} beat the {b} because {it} played {}.", "well brilliantly", "badly poorly",
     "team:club boy/he:man girl/she:woman"),
    ("The {a} visited the {b} in hospital because {it} was {}.", "worried kind", "ill injured",
     "son/he:father girl/she:mother boy/he:uncle"),
    ("The {a} lent money to the {b} because {it} was {}.", "rich wealthy", "poor broke",
     "king/he:farmer woman/she:girl bank:company"),
    ("The {a} obeyed the {b} because {it} was {}.", "loyal afraid", "powerful strict",
     "soldier/he:king dog:wolf boy/he:father"),
    ("The {a} followed the {b} because {it} was {}.", "lost curious", "leading ahead",
     "dog:horse boy/he:man ship:boat"),
    ("The {a} fell off the {b} because {it} was {}.", "round unbalanced", "tilted slippery",
     "ball:table bottle:shelf vase:roof"),
    ("The {a} scratched the {b} because {it} was {}.", "sharp rough", "soft delicate",
     "needle:table key:car nail:floor"),
    ("The {a} was hidden behind the {b} because {it} was so {}.", "small tiny", "big tall",
     "cat:chair child:tree house:hill"),
    ("The {a} burned the {b} because {it} was {}.", "hot burning", "dry flammable",
     "fire:forest lamp:paper candle:curtain"),
    ("The {a} protected the {b} because {it} was {}.", "strong brave", "weak helpless",
     "wall:city dog:child lion:cub"),
    ("The {a} carried the {b} because {it} was {}.", "strong sturdy", "injured tired",
     "horse:man soldier/he:boy camel:girl"),
    ("The {a} stopped the {b} because {it} was {}.", "responsible watchful", "speeding drunk",
     "policeman/he:driver guard/he:thief woman/she:cyclist"),
]  # fmt: skip
CLASSIC = [("animal", "street", "it", word) for word in ("tired", "wide")]


class Probe(NamedTuple):
    """A sentence with its two nouns and its pronoun, as spans of characters."""

    text: str
    nouns: tuple[tuple[int, int], tuple[int, int]]
    pronoun: tuple[int, int]
    answer: int
    """Which noun is meant: 0 or 1."""
    pattern: int


def probe(pattern: str, nouns: tuple[str, str], pronoun: str, word: str, answer: int, number: int = -1) -> Probe:
    """Fill a pattern; where each part came to stand is remembered."""
    parts = {"{a}": nouns[0], "{b}": nouns[1], "{it}": pronoun, "{}": word}
    text, spans = "", {}
    for piece in re.split(r"(\{\w*\})", pattern):
        spans.setdefault(piece, (len(text), len(text) + len(parts.get(piece, ""))))
        text += parts.get(piece, piece)
    return Probe(text, (spans["{a}"], spans["{b}"]), spans["{it}"], answer, number)


def probes() -> list[Probe]:
    """All sentences; those of a pair follow each other."""
    out = []
    for number, (pattern, first, second, fills) in enumerate(PATTERNS):
        for turn, fill in enumerate(fills.split()):
            left, right = fill.split(":")
            noun, _, pronoun = left.partition("/")
            for answer, words in enumerate((first, second)):
                out.append(probe(pattern, (noun, right), pronoun or "it", words.split()[turn % 2], answer, number))
    return out


def attention(predictor: Predictor, texts: list[str]) -> list[Tensor]:
    """Every head's map of every text: (layers * heads, token, token)."""
    out = []
    for text in texts:
        ids, lengths = pad_sources([one.ids for one in predictor.encode([text])])
        with torch.inference_mode(), regard.record(predictor.model) as maps:
            predictor.model.states(ids, lengths)
        out.append(torch.cat([weights[0] for _, weights in sorted(maps.items())]))
    return out


def places(predictor: Predictor, text: str, span: tuple[int, int]) -> list[int]:
    """The tokens that a span of characters became."""
    offsets = predictor.encode([text])[0].offsets
    return [i for i, (start, end) in enumerate(offsets) if start < span[1] and end > span[0]]


def leanings(predictor: Predictor, sentences: list[Probe]) -> dict[str, Tensor]:
    """By direction, how much more each head ties the pronoun to the first noun than to the second: (heads, sentences).
    The tokens of a noun are added up."""
    rows: dict[str, list[Tensor]] = {"pronoun to noun": [], "noun to pronoun": []}
    for one, maps in zip(sentences, attention(predictor, [one.text for one in sentences]), strict=True):
        pronoun = places(predictor, one.text, one.pronoun)
        left, right = (places(predictor, one.text, span) for span in one.nouns)
        there = [maps[:, pronoun][:, :, noun].sum(2).mean(1) for noun in (left, right)]
        back = [maps[:, noun][:, :, pronoun].mean(1).sum(1) for noun in (left, right)]
        rows["pronoun to noun"].append(there[0] - there[1])
        rows["noun to pronoun"].append(back[0] - back[1])
    return {name: torch.stack(found, dim=1) for name, found in rows.items()}


def right(lean: Tensor, answers: Tensor) -> Tensor:
    """Which sentences a head is right about, (heads, sentences); undecided is half right."""
    wanted = torch.where(answers == 0, 1.0, -1.0)
    return (lean * wanted > 0).float() + 0.5 * (lean == 0)


def pairs_right(lean: Tensor) -> Tensor:
    """Of every pair (heads, pairs): whether the head leans to the first noun more where that one is meant. A head's
    love of a place, or of a noun, is the same in both sentences and cancels out."""
    difference = lean[:, 0::2] - lean[:, 1::2]
    return (difference > 0).float() + 0.5 * (difference == 0)


def folded(hits: Tensor, groups: Tensor, folds: int = 10) -> Tensor:
    """The hits (items,) of the head that was best on the other folds; all of a pattern's sentences are in one fold."""
    out = torch.zeros(hits.shape[1])
    for fold in range(folds):
        held = groups % folds == fold
        out[held] = hits[hits[:, ~held].mean(1).argmax()][held]
    return out


def interval(hits: Tensor, groups: Tensor, draws: int = 2000) -> tuple[float, float]:
    """95 % of the means when patterns are drawn anew."""
    numbers = groups.unique().tolist()
    own = {number: hits[groups == number] for number in numbers}
    generator = random.Random(1)
    means = sorted(
        float(torch.cat([own[i] for i in generator.choices(numbers, k=len(numbers))]).mean()) for _ in range(draws)
    )
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def luck(hits: Tensor, groups: Tensor, found: float, draws: int = 500) -> float:
    """How often the cross-validated share is as large when, pattern by pattern, right and wrong are swapped at will."""
    generator = torch.Generator().manual_seed(1)
    count = 0
    for _ in range(draws):
        swap = torch.randint(2, (int(groups.max()) + 1,), generator=generator).bool()[groups]
        count += float(folded(torch.where(swap, 1 - hits, hits), groups).mean()) >= found
    return (count + 1) / (draws + 1)


def measured(table: Table, name: str, hits: Tensor, groups: Tensor, form: tuple[int, int]) -> int:
    """A row of the table; the head that is best in hindsight, of so many layers and heads."""
    chosen = folded(hits, groups)
    low, high = interval(chosen, groups)
    means = hits.mean(1)
    best = int(means.argmax()) % (form[0] * form[1])
    table.add_row(
        name, f"{chosen.mean():.1%}", f"{low:.1%} to {high:.1%}", f"{luck(hits, groups, float(chosen.mean())):.3f}",
        f"{means.max():.1%} ({called(best, form[1])})", f"{means.mean():.1%}",
    )  # fmt: skip
    return best


def called(head: int, heads: int) -> str:
    """A head's name, counted from 0."""
    return f"layer {head // heads}, head {head % heads}"


def draw(predictor: Predictor, path: Path, head: int) -> None:
    """The classic sentence twice: what `it` looks at, in one head."""
    sentences = [probe(PATTERNS[0][0], (a, b), it, word, i) for i, (a, b, it, word) in enumerate(CLASSIC)]
    with open_figure(path, 2, 1, (8.6, 4.6)) as axes:
        for axis, one, maps in zip(axes[0], sentences, attention(predictor, [s.text for s in sentences]), strict=True):
            offsets = predictor.encode([one.text])[0].offsets
            names = [one.text[a:b] or mark for (a, b), mark in zip(offsets, ["<bos>"] + ["<eos>"] * 99, strict=False)]
            (row,) = places(predictor, one.text, one.pronoun)
            nouns = [places(predictor, one.text, span) for span in one.nouns]
            weights = maps[head, row]
            for place, name in enumerate(names):
                meant = place in nouns[one.answer]
                colour = "tab:green" if meant else "tab:red" if place in nouns[1 - one.answer] else "tab:blue"
                axis.text(0, -place, name, ha="right", va="center", fontsize=9, weight="bold" if place == row else None)
                axis.text(
                    1,
                    -place,
                    name,
                    ha="left",
                    va="center",
                    fontsize=9,
                    color=colour if colour != "tab:blue" else "black",
                )
                share = float(weights[place])
                axis.plot(
                    [0.03, 0.97], [-row, -place], color=colour, linewidth=0.3 + 9 * share, alpha=min(1.0, 0.15 + share)
                )
                if place in (*nouns[0], *nouns[1]):
                    axis.text(1.42, -place, f"{share:.2f}", ha="left", va="center", fontsize=9, color=colour)
            axis.set_xlim(-0.5, 1.7)
            form = called(head, predictor.config.model.heads)
            axis.set_title(f"too {CLASSIC[one.answer][3]}: what `it` looks at ({form}); green is meant", fontsize=9)
            axis.axis("off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--picture", type=Path)
    wishes = parser.parse_args()
    torch.set_num_threads(1)
    predictor = regard.load(wishes.run, device="cpu")
    sentences = probes()
    answers = torch.tensor([one.answer for one in sentences])
    groups = torch.tensor([one.pattern for one in sentences])
    found, form = leanings(predictor, sentences), (predictor.config.model.layers, predictor.config.model.heads)
    near = torch.tensor(
        [abs(one.pronoun[0] - one.nouns[1][0]) < abs(one.pronoun[0] - one.nouns[0][0]) for one in sentences]
    )
    console = Console(width=140)
    console.print(
        f"{wishes.run.name}: {len(sentences)} sentences ({len(sentences) // 2} pairs) of {len(PATTERNS)} patterns"
    )
    console.print(f"nearest noun: {(near.long() == answers).float().mean():.1%}; uniform attention, chance: 50.0%")
    table = Table("judged by", "head chosen on 9 folds", "95 %", "p", "best head in hindsight", "mean of all heads")
    chosen = []
    for name, lean in found.items():
        chosen.append(measured(table, f"{name}: more attention", right(lean, answers), groups, form))
    measured(table, "either direction: more attention", right(torch.cat(list(found.values())), answers), groups, form)
    for name, lean in found.items():
        chosen.append(
            measured(table, f"{name}: more than in the other sentence", pairs_right(lean), groups[0::2], form)
        )
    console.print(table)
    for a, b, it, word in CLASSIC:
        one = probe(PATTERNS[0][0], (a, b), it, word, 0)
        (maps,) = attention(predictor, [one.text])
        (row,) = places(predictor, one.text, one.pronoun)
        for head in (chosen[0], chosen[2]):
            left, other = (float(maps[head, row, places(predictor, one.text, span)].sum()) for span in one.nouns)
            console.print(f"too {word}: {called(head, form[1])}: it looks at {a} {left:.3f}, at {b} {other:.3f}")
    if wishes.picture:
        draw(predictor, wishes.picture, chosen[2])


if __name__ == "__main__":
    main()
