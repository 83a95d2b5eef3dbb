"""Maps drawn: in the terminal, and as pictures."""

import contextlib
import io
import itertools
import textwrap
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.errors import InputError
from regard.training.checkpoint import write_file

SHADES = " ░▒▓█"
UNSEEN: dict[str, Any] = {"hatch": "////", "edgecolor": "0.75", "linewidth": 0}
"""How what a row may not see is drawn in pictures."""
FONTS = ("Noto Sans CJK KR", "Noto Sans KR", "NanumGothic", "Apple SD Gothic Neo", "Malgun Gothic", "Noto Sans CJK JP")

REMEDY = (
    "For Korean, Chinese and Japanese, install one, as with `apt install fonts-noto-cjk` (or fonts-nanum, for Korean "
    "alone; elsewhere, from https://fonts.google.com/noto), and draw again."
)


def split_letters(text: str) -> list[str]:
    """A text's letters as they are seen: marks, joiners and what they join stay with the letter before."""
    found: list[str] = []
    for one in unicodedata.normalize("NFC", text):
        joins = unicodedata.category(one) in ("Mn", "Me", "Cf") or (found and found[-1].endswith("\u200d"))
        if found and joins:
            found[-1] += one
        else:
            found.append(one)
    return found


def draw_map(
    weights: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    colour: bool = True,
    most: int = 100,
    top: float | None = None,
) -> Text:
    """A map (query, key) for the terminal: darker is more, `top` (its largest weight, unless given) is black. Without
    colour the shades stay readable. A source wider than `most` characters has its tokens written downwards, and what is
    still wider comes in parts."""
    top = max(float(weights.max()), 1e-6) if top is None else top
    margin = max(map(cell_len, rows)) + 2
    wide = margin + sum(cell_len(key) + 1 for key in columns) <= most
    parted = [split_letters(key) for key in columns]
    cells = max((cell_len(one) for key in parted for one in key), default=1)
    room = max(1, (most - margin) // (cells + 1))
    if not wide and len(columns) > room:
        starts = range(0, len(columns), room)
        parts = [(weights[:, start : start + room], columns[start : start + room]) for start in starts]
        return Text("\n").join(draw_map(part, rows, names, colour, most, top) for part, names in parts)
    widths = [cell_len(key) if wide else cells for key in columns]
    out = Text()
    for line in range(1 if wide else max(map(len, parted))):
        labels = columns if wide else ["".join(key[line : line + 1]) for key in parted]
        padded = [label + " " * (width - cell_len(label)) for label, width in zip(labels, widths, strict=True)]
        out.append((" " * margin + " ".join(padded)).rstrip() + "\n")
    for name, row in zip(rows, weights.tolist(), strict=True):
        out.append(" " * (margin - 2 - cell_len(name)) + name + "  ", style="bold" if colour else "")
        for weight, width in zip(row, widths, strict=True):
            shade = SHADES[min(len(SHADES) - 1, int(weight / top * len(SHADES)))]
            out.append(shade * width + " ", style="cyan" if colour else "")
        out.append("\n")
    return out


def find_dark(tiles: Tensor) -> float:
    """The weight from which on the tiles of a long map are black: one that few of them reach, for a single large one
    would leave the others blank."""
    return float(tiles[tiles > 0].quantile(0.98)) if tiles.any() else 1.0


def place_arcs(parents: Sequence[int]) -> list[int]:
    """How high the arc from each word to its parent is drawn, from 1; 0 for the root. Short ones are low, and no two of
    one height overlap."""
    heights, taken = [0] * len(parents), list[tuple[int, int, int]]()
    for word in sorted(range(len(parents)), key=lambda word: abs(parents[word] - word)):
        low, high = sorted((word, parents[word]))
        if low < high:
            below = [height for first, last, height in taken if first < high and low < last]
            heights[word] = max(below, default=0) + 1
            taken.append((low, high, heights[word]))
    return heights


def draw_arcs(weights: Tensor, words: Sequence[str], most: int = 100) -> Text:
    """The likeliest parent of every word, by weights (word, parent), as arcs for the terminal: an arrow points at each
    word from its parent, a star at the root. What is wider than `most` characters is only said."""
    starts = [0]
    for word in words:
        starts.append(starts[-1] + max(3, cell_len(word)) + 1)
    if starts[-1] > most:
        return Text(f"arcs over {len(words)} tokens are wider than the terminal; a picture (--out) has them\n")
    parents: list[int] = weights.argmax(-1).tolist()
    heights = place_arcs(parents)
    top = max(heights, default=0)
    lines = [[" "] * starts[-1] for _ in range(top + 1)]  # the last has the arrows
    for start, place, parent, height in zip(starts, itertools.count(), parents, heights, strict=False):
        end = start + 1
        lines[top][end] = "▼" if height else "*"
        if height:
            low, high = sorted((starts[parent] + (0 if place < parent else 2), end))
            for column in range(low + 1, high):
                lines[top - height][column] = "─"
            lines[top - height][low], lines[top - height][high] = "╭", "╮"
            for line in range(top - height + 1, top + 1):
                for column in (low, high):
                    if lines[line][column] in " ─":
                        lines[line][column] = "│"
    labels = [word + " " * (starts[i + 1] - starts[i] - cell_len(word)) for i, word in enumerate(words)]
    return Text("\n".join("".join(line).rstrip() for line in [*lines, labels]) + "\n")


def tabulate_calculation(found: Any, columns: Sequence[str], most: int = 200) -> Table:
    """A look's calculation as a table for the terminal: a row a key, from its score to its share; of many keys, the
    `most` with the largest weights, and what the others have together."""
    table = Table("looks at", "query · key", "scaled", "weight", "× value (first of it)", box=None, header_style="bold")
    kept = found.weights.topk(min(most, len(columns))).indices.sort().values.tolist()
    rows = (found.scores, found.scaled, found.seen, found.weights, found.values)
    for name, score, scaled, seen, weight, value in ((columns[one], *(part[one] for part in rows)) for one in kept):
        share = " ".join(f"{number:+.3f}" for number in (weight * value)[:4].tolist())
        numbers = [f"{float(score):+.3f}", f"{float(scaled):+.3f}" if seen else "hidden", f"{float(weight):.4f}"]
        table.add_row(Text(name), *numbers, share)
    if more := len(columns) - len(kept):
        rest = float(found.weights.sum() - found.weights[kept].sum())
        table.add_row(f"{more:,} others", "", "", f"{max(0.0, rest):.4f}", "", style="dim")
    total = " ".join(f"{number:+.3f}" for number in found.context[:4].tolist())
    table.add_row("sum", "", "", f"{float(found.weights.sum()):.4f}", total, style="bold")
    return table


def write_structure(kind: str, places: Sequence[int], rows: Sequence[str], columns: Sequence[str]) -> str:
    """One structure in words: the tags; each word with its parent, a star for the root; the chosen keys, a dash for any
    other."""
    if kind == "taggings":
        return " ".join(columns[tag] for tag in places)
    if kind == "trees":
        pairs = enumerate(places)
        return " ".join(
            f"*{rows[word]}" if word == parent else f"{columns[parent]}→{rows[word]}" for word, parent in pairs
        )
    return " ".join(name if chosen else "-" for name, chosen in zip(columns, places, strict=True))


def tabulate_structures(found: Any, rows: Sequence[str], columns: Sequence[str]) -> Table:
    """The likeliest structures behind a row as a table: each with what the row has in it, where that is one thing."""
    table = Table("probability", found.kind, box=None, header_style="bold")
    single = found.kind != "sets of keys"
    if single:
        table.add_column("has")
    parts = zip(found.chances.tolist(), found.picks.long().argmax(-1).tolist(), found.structures.tolist(), strict=True)
    for chance, picked, places in parts:
        written = Text(write_structure(found.kind, places, rows, columns))
        table.add_row(f"{chance:.4f}", written, *([Text(columns[picked])] if single else []))
    return table


def tabulate_sums(found: Any, weights: Tensor, columns: Sequence[str]) -> Table:
    """What the probabilities of a row's structures sum to, for every column, beside the weight of the map."""
    table = Table("has", f"sum of its {found.kind}", "weight", box=None, header_style="bold")
    for name, total, weight in zip(columns, found.sums.tolist(), weights.tolist(), strict=True):
        table.add_row(Text(name), f"{total:.4f}", f"{weight:.4f}")
    return table


def tabulate_potentials(found: Any, columns: Sequence[str]) -> Table:
    """A row of a matching as a table: what is added to every score, and the weight that it makes."""
    table = Table("looks at", "score", "+ row", "+ column", "exp = weight", box=None, header_style="bold")
    for name, score, column in zip(columns, found.scores, found.columns, strict=True):
        numbers = (f"{float(number):+.3f}" for number in (score, found.row, column))
        table.add_row(Text(name), *numbers, f"{float((score + found.row + column).exp()):.4f}")
    return table


def tabulate_heads(maps: Iterable[tuple[str, Sequence[float], Sequence[float] | None]]) -> Table:
    """Every head as a row: how widely it looks (entropy, in bits) and how far (in tokens; self-attention only)."""
    table = Table("map", "head", "entropy", "distance", box=None, header_style="bold")
    for name, entropy, distance in maps:
        for head, bits in enumerate(entropy):
            table.add_row(name, str(head), f"{bits:.2f}", "" if distance is None else f"{distance[head]:.1f}")
    return table


def find_fonts() -> list[str]:
    """The fonts to draw with. What matplotlib knows may be older than a font that was installed since, so the system is
    asked where it knows none of FONTS."""
    from matplotlib import font_manager

    def known() -> list[str]:
        names = {font.name for font in font_manager.fontManager.ttflist}
        return [font for font in FONTS if font in names]

    if not known():
        stems = [font.replace(" ", "").removesuffix("KR").removesuffix("JP").lower() for font in FONTS]
        for path in font_manager.findSystemFonts():
            if Path(path).name.lower().startswith(tuple(stems)):
                font_manager.fontManager.addfont(path)
    return ["DejaVu Sans", *known()]


def find_missing(texts: Iterable[str], fonts: Iterable[str]) -> str:
    """The letters that none of the fonts has, for which boxes are drawn."""
    from matplotlib import font_manager

    files = {font_manager.findfont(font) for font in fonts}
    known = set().union(*(font_manager.get_font(file).get_charmap() for file in files))
    return "".join(sorted({one for text in texts for one in text if not one.isspace() and ord(one) not in known}))


@contextlib.contextmanager
def open_figure(path: Path, columns: int, rows: int, size: tuple[float, float]) -> Iterator[Any]:
    """Axes (rows, columns) to draw on; the file is written beside and renamed. A warning names letters without a
    font."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("pictures need matplotlib: pip install 'regard[pictures]'.") from error
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InputError(f"{path} ends in {path.suffix!r}; a picture's name ends in .png, .svg or .pdf.")
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.text import Text as Label

    fonts = find_fonts()
    with pyplot.rc_context({"font.family": fonts, "svg.hashsalt": "regard"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # one for every missing letter; below, one for all
        drawing, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        try:
            yield axes
            file = io.BytesIO()
            drawing.savefig(file, dpi=160, format=path.suffix[1:].lower())
            write_file(path, file.getvalue())
            missing = find_missing((label.get_text() for label in drawing.findobj(Label)), fonts)
        finally:
            pyplot.close(drawing)
    if missing:
        warnings.warn(f"{path}: boxes stand for {missing[:20]!r}: no font with them was found. {REMEDY}", stacklevel=2)


def wrap_title(title: str, width: int, most: int = 4) -> str:
    """A title whose every line is broken into at most `most` of a width in letters, of which wide ones take two."""
    lines = []
    for line in title.expandtabs(4).splitlines():
        letters = max(10, width * len(line) // max(1, cell_len(line)))
        lines += textwrap.wrap(line, letters, max_lines=most, placeholder=" …")
    return "\n".join(lines)


def plot_arcs(axis: Any, weights: Tensor, words: Sequence[str], least: float = 0.05) -> None:
    """Soft parents (word, parent) as arcs over the words: the darker, the likelier; a line from above is the root."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    reach = 1.0
    for word, parent in (weights >= least).nonzero().tolist():
        share, height = float(weights[word, parent]), abs(word - parent) ** 0.7
        reach = max(reach, height)
        if word == parent:
            ends = [(word, 0.0), (word, 1.0)]
            curve = Curve(ends, [Curve.MOVETO, Curve.LINETO])
        else:
            from_side = parent + (0.12 if word > parent else -0.12)
            points = [(from_side, 0.0), (from_side, 1.33 * height), (word, 1.33 * height), (word, 0.0)]
            curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
        axis.add_patch(PathPatch(curve, fill=False, alpha=min(1.0, share), linewidth=0.4 + 1.4 * share))
        axis.plot([word], [0.0], marker="v", markersize=4, color="black", alpha=min(1.0, share))
    axis.set_xlim(-0.5, len(words) - 0.5)
    axis.set_ylim(0, 1.1 * reach)
    axis.set_yticks([])
    axis.set_frame_on(False)
    axis.xaxis.set_ticks(range(len(words)), words, rotation=90, fontsize=8, parse_math=False)
    axis.tick_params(length=0)


def save_map(
    path: Path,
    weights: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    seen: Tensor | None = None,
    top: float | None = None,
    *,
    arcs: bool = False,
) -> None:
    """One map (query, key) with its tokens, hatched where nothing is `seen`; the brightest is `top`, or the largest
    weight. With `arcs`, also as arcs over the tokens."""
    from matplotlib.patches import Rectangle

    width, height = (min(24.0, 2.0 + 0.32 * count) for count in (len(columns), len(rows)))
    heading = wrap_title(title, round(12 * max(3.0, width)))
    size = (max(3.0, width), (1.7 if arcs else 1.0) * max(2.5, height) + 0.15 * heading.count("\n"))
    with open_figure(path, 1, 2 if arcs else 1, size) as axes:
        if arcs:
            plot_arcs(axes[0, 0], weights, columns)
        axis = axes[-1, 0]
        if seen is not None:
            weights = weights.masked_fill(~seen, torch.nan)
            axis.add_patch(Rectangle((0, 0), 1, 1, transform=axis.transAxes, fill=False, zorder=-1, **UNSEEN))
        options = {"cmap": "viridis", "vmin": 0, "vmax": top, "aspect": "auto", "interpolation": "nearest"}
        image, extend = axis.imshow(weights.numpy(), **options), "neither" if top is None else "max"
        axis.figure.colorbar(image, ax=axis, fraction=0.05, pad=0.02, extend=extend).ax.tick_params(labelsize=7)
        axis.figure.suptitle(heading, fontsize=9, parse_math=False)
        for ticks, labels, turn in ((axis.xaxis, columns, 90), (axis.yaxis, rows, 0)):
            step = max(1, len(labels) // 80)
            ticks.set_ticks(range(0, len(labels), step), labels[::step], rotation=turn, fontsize=8, parse_math=False)
        axis.xaxis.tick_top()


def save_lines(path: Path, lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str) -> None:
    """Named lines of points, both axes logarithmic."""
    with open_figure(path, 1, 1, (7.0, 5.0)) as axes:
        axis = axes[0, 0]
        for name, points in lines.items():
            axis.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set_xlabel(across)
        axis.set_ylabel(up)
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=8)


def save_grid(path: Path, maps: Sequence[tuple[str, Tensor]]) -> None:
    """Every head (column) of every map (row) as a small picture, each in its own scale: named weights (heads, query,
    key). Too small for tokens: one map is drawn with them (`save_map`)."""
    most = max(len(weights) for _, weights in maps)
    with open_figure(path, most, len(maps), (1.6 + 1.5 * most, 1.5 * len(maps))) as axes:
        for line, (name, weights) in zip(axes, maps, strict=True):
            for head, axis in enumerate(line):
                axis.set_xticks([])
                axis.set_yticks([])
                if head < len(weights):
                    axis.imshow(weights[head].numpy(), cmap="viridis", vmin=0, aspect="auto")
                    axis.set_xlabel(f"head {head}", fontsize=6)
                else:
                    axis.axis("off")
            line[0].set_ylabel(name.replace(".blocks.", " ").replace("_attention", ""), fontsize=6)
