"""Texts, tokens and words as vectors: a model's states and its embedding table, and what is near what."""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batching import pad_sources
from regard.data.encoding import Encoded
from regard.data.examples import Source
from regard.data.vocabulary import SPECIAL, Vocabulary
from regard.errors import InputError
from regard.explain.plots import open_figure
from regard.inference.predictor import Predictor, group_by_length
from regard.training.checkpoint import write_file


class Near(NamedTuple):
    """Something near: its number, and the cosine of the angle between."""

    number: int
    cosine: float


def embed(predictor: Predictor, texts: Iterable[Source], *, normalize: bool = False) -> Tensor:
    """A vector (texts, size) for every text: the mean of its tokens' states, those of <bos> and <eos> among them where
    the model reads them; with `normalize`, of length 1. An empty text has zeros."""
    rows = read_texts(predictor, texts)
    found = {index: own.mean(0) for index, own in encode_rows(predictor, rows)}
    size = len(next(iter(found.values()))) if found else embedding_table(predictor).shape[1]
    vectors = torch.stack([found.get(index, torch.zeros(size)) for index in range(len(rows))])
    return F.normalize(vectors, dim=-1) if normalize else vectors


def token_states(predictor: Predictor, texts: Iterable[Source]) -> list[tuple[Encoded, Tensor]]:
    """Every text as the model reads it, and the state (tokens, size) of each of its tokens: of the encoder, or of a
    language model. A model that reads whole sentences as one has no state of a token."""
    predictor.task.check_token_states()
    rows = read_texts(predictor, texts)
    found = {index: own.clone() for index, own in encode_rows(predictor, rows)}
    size = next(iter(found.values())).shape[1] if found else embedding_table(predictor).shape[1]
    return [(row, found.get(index, torch.zeros(0, size))) for index, row in enumerate(rows)]


def read_texts(predictor: Predictor, texts: Iterable[Source]) -> list[Encoded]:
    """Texts as the model reads them; none at all is an error."""
    rows = predictor.encode(texts, "line")
    if not rows:
        raise InputError("no text came: give at least one line.")
    return rows


def encode_rows(predictor: Predictor, rows: Sequence[Encoded], budget: int = 4096) -> Iterator[tuple[int, Tensor]]:
    """The number of each text that is not empty and its states (tokens, size), or (sentences, size) of a model that
    reads whole sentences; as many texts at once as the budget of tokens allows."""
    device = next(predictor.model.parameters()).device
    for group in group_by_length([row.ids for row in rows], budget):
        ids, lengths = (part.to(device) for part in pad_sources([rows[i].ids for i in group]))
        with torch.inference_mode():
            found, counts = predictor.task.states(predictor.model, ids, lengths)
        yield from ((i, own[:n]) for i, own, n in zip(group, found.float().cpu(), counts.tolist(), strict=True))


def embedding_table(predictor: Predictor) -> Tensor:
    """The embedding (vocab, size) of what a model reads; of one that reads images, of what it writes."""
    next(predictor.model.parameters())  # says so where the weights are not ours to see
    tables = predictor.task.embeddings(predictor.model)
    if not tables:
        raise InputError("this model has no words, and so no vectors of words.")
    return tables[0].table.weight


def nearest(vectors: Tensor, count: int) -> list[list[Near]]:
    """For every vector (texts, size) the `count` others whose direction is most like its own, nearest first."""
    if count < 1:
        raise InputError(f"how many neighbours? At least 1, not {count}.")
    normal = F.normalize(vectors, dim=-1)
    found = []
    for start in range(0, len(normal), 1024):
        cosines = normal[start : start + 1024] @ normal.T
        own = torch.arange(len(cosines))
        cosines[own, own + start] = -torch.inf
        best = cosines.topk(min(count, len(normal) - 1))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found += [[Near(*pair) for pair in zip(*row, strict=True)] for row in pairs]
    return found


def nearest_words(predictor: Predictor, wanted: str | Sequence[str], count: int = 10) -> list[tuple[str, float]]:
    """The entries of the vocabulary, and their cosines, whose embedding is nearest to a word's; or, of three words
    a b c, to b - a + c: what is to c as b is to a. The words themselves are left out, and special entries."""
    wanted = wanted.split() if isinstance(wanted, str) else wanted
    if len(wanted) not in (1, 3):
        raise InputError(f"one word, or three for an analogy (a b c: what is to c as b is to a), not {len(wanted)}.")
    ids = [find_entry(predictor.source, word) for word in wanted]
    table = F.normalize(embedding_table(predictor).detach().float().cpu(), dim=-1)
    target = table[ids[0]] if len(ids) == 1 else table[ids[1]] - table[ids[0]] + table[ids[2]]
    cosines = table @ F.normalize(target, dim=0)
    cosines[[*range(len(SPECIAL)), *ids]] = -torch.inf
    best = cosines.topk(min(count, int(cosines.isfinite().sum())))
    return [(predictor.source.spelled(i).strip(), cosine) for cosine, i in zip(*map(Tensor.tolist, best), strict=True)]


def find_entry(vocabulary: Vocabulary, word: str) -> int:
    """The id of a word that is one entry of the vocabulary."""
    found = vocabulary.find(word)
    if found is None:
        parts = " ".join(vocabulary.token(i) for i in vocabulary.encode(word).ids)
        raise InputError(f"{word!r} is no entry of the vocabulary, but {parts or 'nothing'}: it has no vector.")
    return found


def save_vectors(path: Path, vectors: Tensor) -> None:
    """Vectors as .npy, which NumPy reads without unpickling."""
    if path.suffix != ".npy":
        raise InputError(f"{path} must end in .npy.")
    file = io.BytesIO()
    numpy.save(file, vectors.numpy(), allow_pickle=False)
    write_file(path, file.getvalue())


def save_tokens(path: Path, found: Sequence[tuple[Encoded, Tensor]], vocabulary: Vocabulary) -> None:
    """All tokens' vectors, one text after another, as .npy (tokens, size); beside it, a .json with each text, which
    rows are its own (from start to end), its tokens, and the characters they came from."""
    save_vectors(path, torch.cat([own for _, own in found]))
    lines, start = [], 0
    for row, own in found:
        line = {"text": str(row.source), "start": start, "end": start + len(own)}
        lines.append(line | {"tokens": [vocabulary.token(i) for i in row.ids], "offsets": row.offsets})
        start += len(own)
    write_file(path.with_suffix(".json"), json.dumps({"lines": lines}, ensure_ascii=False, indent=1).encode())


def project_to_plane(vectors: Tensor) -> Tensor:
    """Vectors (n, size) -> (n, 2): along the two directions in which they differ most (PCA)."""
    centred = vectors.double() - vectors.double().mean(0)
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    points = (left * values)[:, :2]
    points = points * torch.where(points.abs().max(0).values == points.max(0).values, 1.0, -1.0)  # one of two mirrors
    return F.pad(points, (0, 2 - points.shape[1])).float()


def draw_vectors(path: Path, vectors: Tensor, labels: Sequence[str], most: int = 40) -> None:
    """A picture of vectors (n, size) with their labels, of which `most` characters are shown."""
    points = project_to_plane(vectors)
    height = max(4.0, min(14.0, 3.0 + 0.25 * len(labels)))
    with open_figure(path, 1, 1, (1.4 * height, height)) as axes:
        axis = axes[0, 0]
        axis.scatter(points[:, 0].numpy(), points[:, 1].numpy(), s=14)
        middle = (points[:, 0].min() + points[:, 0].max()).item() / 2
        for (x, y), label in zip(points.tolist(), labels, strict=True):
            text = label if len(label) <= most else label[: most - 1] + "…"
            side = {"xytext": (-4, 3), "ha": "right"} if x > middle else {"xytext": (4, 3), "ha": "left"}
            axis.annotate(text, (x, y), textcoords="offset points", fontsize=8, parse_math=False, **side)
        axis.margins(0.1, 0.08)
        axis.set_xticks([])
        axis.set_yticks([])
