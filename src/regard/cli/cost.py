"""`regard cost`: what layers cost on this machine, measured and shown beside what the books say."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.errors import ConfigError

if TYPE_CHECKING:
    from regard.evaluation.cost import Sizes

LONG, SHORT = 2048, (32, 128)
"""Lengths from which on times are fitted, and at which steps and reach are counted."""


def cost(
    size: Annotated[int, typer.Option(min=1, help="Size of the states (d).")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    most: Annotated[int, typer.Option(min=256, help="The longest text, in tokens.")] = 16_384,
    layers: Annotated[str, typer.Option(help="Kinds of layers, separated by commas; else all.")] = "",
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds that one pass may take.")] = 20.0,
    picture: Annotated[Path | None, typer.Option("--out", help="Draw times by length: .png, .svg, .pdf.")] = None,
) -> None:
    """Measure what layers cost on this machine by length: time, memory, steps that wait for each other, and reach.

    Examples: `regard cost`, `regard cost --most 65536 --layers linformer,bigbird --out cost.png`
    """
    from regard.evaluation.cost import LAYERS, Sizes

    if size % heads:
        raise ConfigError(f"--size {size} is not a multiple of --heads {heads}.")
    if picture is not None and picture.suffix.lower() not in (".png", ".svg", ".pdf"):  # before all the measuring
        raise ConfigError(f"--out {picture}: a picture's name ends in .png, .svg or .pdf.")
    lengths = [128 << power for power in range(20) if 128 << power <= most]
    names = [name.strip() for name in layers.split(",")] if layers else list(LAYERS)
    show_costs(lengths, Sizes(size, heads), names, limit, picture)


def show_costs(
    lengths: Sequence[int], sizes: "Sizes", names: Sequence[str], limit: float, picture: Path | None
) -> None:
    """Measure layers, and show time, memory, fitted exponents, steps and reach beside what the books say."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    from regard.cli.console import out, say
    from regard.evaluation import cost as costs_of
    from regard.explain.plots import save_lines

    costs: list[costs_of.Cost] = []
    for found in costs_of.measure_costs(lengths, sizes, names, limit, free_memory()):
        if isinstance(found, str):
            say(found)
            continue
        costs.append(found)
        took = f"{1000 * found.forward:,.1f} ms forward, {1000 * found.both:,.1f} with backward"
        say(f"{found.layer} {found.n:,} tokens: {took}, {found.memory / 1e6:,.1f} MB")
    first = Column("layer", no_wrap=True, min_width=max(map(len, names)))
    heads = ("work", "time", "memory", "steps", "counted", "path", "layers", "beats full")
    narrow = [Column(head, no_wrap=head in ("time", "memory"), min_width=max(map(len, head.split()))) for head in heads]
    table = Table(first, *narrow, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        own, layer = [one for one in costs if one.layer == name and one.n >= LONG], costs_of.LAYERS[name]
        fitted = [
            f"n^{costs_of.fit_exponent([one.n for one in own], values):.2f}" if len(own) > 1 else "-"
            for values in ([one.both for one in own], [one.memory for one in own])
        ]
        steps = " / ".join(f"{costs_of.count_steps(name, n, costs_of.SMALL):,}" for n in SHORT)
        reach = " / ".join(f"{costs_of.count_layers(name, n, costs_of.SMALL):,}" for n in SHORT)
        crossing = costs_of.find_crossing(costs, name)
        beats = "" if name == "self-attention" else "-" if crossing is None else f"{crossing:,}"
        table.add_row(name, layer.work, *fitted, layer.steps, steps, layer.path, reach, beats)
    out.print(table)
    short = " / ".join(map(str, SHORT))
    say(f"time (with backward) and memory: fitted from {LONG:,} tokens on; steps counted at {short} tokens;")
    say(f"layers: on top of each other until a token sees all {short}; beats full: faster from so many tokens on")
    if picture is not None:
        lines = {name: [(one.n, one.both) for one in costs if one.layer == name] for name in names}
        save_lines(picture, {name: points for name, points in lines.items() if points}, "tokens", "seconds")
        say(f"written: {picture}")


def free_memory() -> int:
    """Bytes that may still be used; where a system does not tell, as many as one likes."""
    if "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return 2**62
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
