"""Word vectors for an embedding: loaded from a text file (word2vec, GloVe, fastText), or counted from text."""

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.files import MARK, read_bytes
from regard.errors import DataError

WINDOW = 2
"""Neighbours on either side that are counted: near ones say of what kind a word is, far ones of what the text is."""
PIECE = 2**21
"""Tokens that are counted at once."""


def load_vectors(table: nn.Embedding, path: str, find: Callable[[str], int | None]) -> int:
    """Fill the rows of an embedding whose word is in a text file of vectors: a word and its numbers on every line,
    with or without a first line `count size`. Words without a vector keep their random row. Of several
    spellings of one word the first counts. Returns how many rows were filled."""
    size, filled = table.weight.shape[1], set()
    raw = io.BytesIO(read_bytes(path).removeprefix(MARK))
    parted = ((number, line.decode("utf-8", "replace").rstrip().split(" ")) for number, line in enumerate(raw, 1))
    lines: Iterator[tuple[int, list[str]]] = (pair for pair in parted if pair[1] != [""])
    first, header = next(lines, (1, []))
    if len(header) == 2 and size != 1 and all(part.isdecimal() for part in header):
        width = int(header[1])
    else:
        width, lines = len(header) - 1, itertools.chain([(first, header)], lines)
    if width != size:
        raise DataError(
            f"{path} holds vectors of {width:,} numbers, but the embedding is {size:,} wide. "
            "Set the model's embedding size to the file's."
        )
    for number, parts in lines:
        if len(parts) <= size:
            raise DataError(f"{path}:{number} is not a word and {size} finite numbers.")
        row = find(" ".join(parts[:-size]))
        if row is None or row in filled:  # frequent spellings come first
            continue
        try:
            vector = torch.tensor([float(value) for value in parts[-size:]])
        except ValueError as error:
            raise DataError(f"{path}:{number} is not a word and {size} numbers: {error}.") from error
        if not vector.isfinite().all():
            raise DataError(f"{path}:{number} is not a word and {size} finite numbers.")
        with torch.no_grad():
            table.weight[row] = vector
        filled.add(row)
    if not filled:
        raise DataError(
            f"no word of {path} is in the vocabulary: nothing was loaded. Is it the same language and kind?"
        )
    return len(filled)


def count_vectors(table: nn.Embedding, texts: Iterable[Sequence[int]], seed: int = 1) -> int:
    """Fill the rows of an embedding from texts, which are ids, so that entries with like neighbours have like rows: by
    how much more often than by chance each neighbour comes (positive pointwise mutual information), before and behind
    an entry apart, in as few directions as the table is wide (a truncated singular value decomposition; Levy 2015).
    Rows are 1 long; one without neighbours keeps its random row. Returns how many were filled."""
    size = table.weight.shape[1]
    gain = compute_ppmi(count_neighbours(texts, len(table.weight)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        left, values, _ = torch.svd_lowrank(gain, q=min(size + 16, len(table.weight)), niter=4)
    rows = (left * values.sqrt())[:, :size]
    filled = torch.unique(gain.indices()[0])
    with torch.no_grad():
        table.weight[filled] = F.pad(F.normalize(rows[filled], dim=1), (0, size - rows.shape[1]))
    return len(filled)


def count_neighbours(texts: Iterable[Sequence[int]], entries: int) -> Tensor:
    """How often every entry stands near every other (entries, 2 entries), sparse: behind it, then before it. One that
    is n places away counts 1 / n."""
    total = torch.zeros(entries, 2 * entries, layout=torch.sparse_coo)
    stream = itertools.chain.from_iterable([*text, *[-1] * WINDOW] for text in texts)
    while piece := list(itertools.islice(stream, PIECE)):  # pairs across two pieces are too few to matter
        ids = torch.tensor(piece)
        for distance in range(1, min(WINDOW, len(ids) - 1) + 1):
            first, second = ids[:-distance], ids[distance:]
            both = (first >= 0) & (second >= 0)
            first, second = first[both], second[both]
            places = torch.cat([torch.stack([first, second]), torch.stack([second, first + entries])], 1)
            counts = torch.full((places.shape[1],), 1 / distance)
            total = total + torch.sparse_coo_tensor(places, counts, total.shape, check_invariants=False)
        total = total.coalesce()
    return total


def compute_ppmi(counts: Tensor, power: float = 0.75) -> Tensor:
    """Positive pointwise mutual information of sparse counts (rows, columns): log p(column | row) / p(column), where it
    is above 0. Rare columns, whose share says little, are taken for commoner: counts are raised to a `power`."""
    counts = counts.coalesce()
    (rows, columns), values = counts.indices(), counts.values()
    by_row = torch.zeros(counts.shape[0]).index_add_(0, rows, values)
    by_column = torch.zeros(counts.shape[1]).index_add_(0, columns, values) ** power
    gain = (values / by_row[rows] / (by_column / by_column.sum())[columns]).log()
    more = gain > 0
    kept = counts.indices()[:, more]
    return torch.sparse_coo_tensor(kept, gain[more], counts.shape, is_coalesced=True, check_invariants=False)
