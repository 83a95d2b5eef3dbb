"""What a model looked at, drawn."""

from typing import NamedTuple

import torch
from rich.text import Text
from torch import Tensor

from regard.batch import Pair, collate
from regard.errors import InputError
from regard.predict import Predictor
from regard.record import record
from regard.text import EOS

SHADES = " ░▒▓█"


class Alignment(NamedTuple):
    """An output and where each of its tokens looked; the last row and column are <eos>."""

    text: str
    queries: list[str]
    keys: list[str]
    weights: Tensor  # (query, key)


def alignment(predictor: Predictor, text: str) -> Alignment:
    """Translate a text and give its map from output to source: the mean over the heads of the last cross-attention."""
    source = predictor.encode(text)
    if not source:
        raise InputError("there is nothing to look at in an empty text.")
    answer = predictor.predict([text])[0][0]
    target = predictor.target.encode(answer.text).ids
    batch = collate([Pair([*source, EOS], target)])
    with torch.inference_mode(), record(predictor.model) as maps:
        predictor.model.hidden(batch)
    crosses = [weights for name, weights in maps.items() if name.endswith(("cross_attention", "decoder.attention"))]
    if not crosses:
        raise InputError("this model has no attention between output and source.")
    pieces = predictor.source.encode(text)
    keys = [text[start:end].strip() or "·" for start, end in pieces.offsets[: len(source)]]
    spans = predictor.target.encode(answer.text).offsets
    queries = [answer.text[start:end].strip() or "·" for start, end in spans]
    return Alignment(answer.text, [*queries, "<eos>"], [*keys, "<eos>"], crosses[-1][0].mean(0))


def drawn(aligned: Alignment, colour: bool = True, most: int = 100) -> Text:
    """An alignment for the terminal: a row an output token, a column a source token, darker is more. Without colour
    the shades stay readable. A source wider than `most` characters has its tokens written downwards."""
    margin = max(map(len, aligned.queries)) + 2
    wide = margin + sum(len(key) + 1 for key in aligned.keys) <= most
    widths = [len(key) if wide else 1 for key in aligned.keys]
    lines = 1 if wide else max(map(len, aligned.keys))
    out = Text()
    for line in range(lines):
        labels = aligned.keys if wide else [key[line : line + 1] or " " for key in aligned.keys]
        out.append(" " * margin + " ".join(labels) + "\n")
    for name, weights in zip(aligned.queries, aligned.weights.tolist(), strict=True):
        out.append(f"{name:>{margin - 2}}  ", style="bold" if colour else "")
        for weight, width in zip(weights, widths, strict=True):
            shade = SHADES[min(len(SHADES) - 1, int(weight * len(SHADES)))]
            out.append(shade * width + " ", style="cyan" if colour else "")
        out.append("\n")
    return out
