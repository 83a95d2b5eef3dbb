"""Files -> examples, format by format: pairs, labels, stories, questions, documents; and the table of formats.

What cannot be an example comes as `Dropped`, with its reason and its place.
"""

import io
import itertools
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regard.config import data
from regard.data.columns import read_columns, read_conllu
from regard.data.cutting import cut_shares, cut_sources
from regard.data.examples import Dropped, Example, Question, Splits
from regard.data.files import (
    MARK,
    decode_line,
    drop_trailing_blanks,
    find_column,
    get_list,
    get_text,
    is_blank,
    parse_object,
    read_bytes,
    read_csv_rows,
    read_lines,
    split_lines,
)
from regard.data.images.captions import read_captions
from regard.errors import DataError

Read = Iterator[Example | Dropped]


def read_parallel(settings: data.ParallelData, sides: data.Sides) -> Read:
    """Lines that belong together, from the files of two sides."""
    if len(sides.source) != len(sides.target):
        raise DataError(
            f"{len(sides.source)} source files but {len(sides.target)} target files: every file needs its partner."
        )
    for left, right in zip(sides.source, sides.target, strict=True):
        sources, targets = read_lines(left, settings.obtain), read_lines(right, settings.obtain)
        shorter = min(len(sources), len(targets))
        while shorter and is_blank(sources[shorter - 1]) and is_blank(targets[shorter - 1]):
            shorter -= 1
        if all(map(is_blank, sources[shorter:])) and all(map(is_blank, targets[shorter:])):
            del sources[shorter:], targets[shorter:]
        if len(sources) != len(targets):
            raise DataError(
                f"{left} has {len(sources):,} lines but {right} has {len(targets):,}: "
                "line n of one must belong to line n of the other. Nothing was read."
            )
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
            where = f"{left}:{number}"
            if source is None or target is None:
                yield Dropped("undecodable", where if source is None else f"{right}:{number}")
            else:
                yield Example(source, target, where)


def read_table(settings: data.TableData, path: str) -> Read:
    """Rows of a tab- or comma-separated file. Tabs separate as they are; commas follow the quoting rules of CSV. A row
    that goes on behind the last column of the first one, as with a separator in its text, is not cut but dropped; so is
    one that ends before a column that is read."""
    rows = (read_csv_rows if settings.kind == "csv" else read_tsv_rows)(path, settings.obtain)
    columns: tuple[int, int] | None = None
    if isinstance(settings.source, int) and isinstance(settings.target, int):
        columns = (settings.source, settings.target)
    width = 0
    for number, row in rows:
        where = f"{path}:{number}"
        empty = row is not None and not any(cell.strip() for cell in row)
        width = width or (0 if empty else len(row or ()))
        if columns is None:
            columns = (find_column(settings.source, row, path), find_column(settings.target, row, path))
        elif row is None:
            yield Dropped("undecodable", where)
        elif empty:
            yield Dropped("empty", where)
        elif settings.kind == "tsv" and any("\r" in cell for cell in row):
            yield Dropped("carriage return inside the line", where)
        elif len(row) <= max(columns) < width:
            yield Dropped("too few columns", where)
        elif len(row) <= max(columns):
            raise DataError(describe_short_row(settings.kind, where, row, max(columns) + 1))
        elif any(cell.strip() for cell in row[width:]):
            yield Dropped("more columns than the first row", where)
        else:
            yield Example(row[columns[0]], row[columns[1]], where)


def describe_short_row(kind: str, where: str, row: list[str], wanted: int) -> str:
    """What is wrong with a file whose first row ends before a column that is read."""
    came = f"{where} has {len(row)} column{'s' * (len(row) != 1)}, expected at least {wanted} ({kind})."
    advice = {
        "\t": 'It holds a tab: data.kind = "tsv".',
        ";": "It holds a semicolon: save the file with commas (csv) or tabs (tsv) between its columns.",
        ",": 'It holds a comma: data.kind = "csv".',
        "": "data.source and data.target say which columns are read.",
    }
    return f"{came} {next(text for mark, text in advice.items() if any(mark in cell for cell in row))}"


def read_tsv_rows(path: str, obtain: str) -> Iterator[tuple[int, list[str] | None]]:
    for number, line in enumerate(drop_trailing_blanks(read_lines(path, obtain)), 1):
        yield number, None if line is None else line.split("\t")


def read_objects(settings: data.JsonData, path: str) -> Read:
    """Objects of a JSONL file, a field a side."""
    return read_records(path, settings.obtain, settings.source, settings.target)


def read_records(path: str, obtain: str, source: str | None, target: str) -> Read:
    """As `read_objects`; a document has no source."""
    for number, line in enumerate(drop_trailing_blanks(read_lines(path, obtain)), 1):
        where = f"{path}:{number}"
        if line is None:
            yield Dropped("undecodable", where)
        elif not line.strip():
            yield Dropped("empty", where)
        else:
            record = parse_object(line, where)
            left = "" if source is None else get_text(record, source, where)
            yield Example(left, get_text(record, target, where), where)


def read_labelled(settings: data.LabelledData, path: str) -> Read:
    """Lines `label text`: a space or a tab stands between the two. A line that begins with one has no label."""
    for number, line in enumerate(drop_trailing_blanks(read_lines(path, settings.obtain)), 1):
        where = f"{path}:{number}"
        if line is None:
            yield Dropped("undecodable", where)
        else:
            label, *text = re.split(r"[ \t]", line.rstrip(), maxsplit=1)
            yield Example("".join(text), label, where)


def read_documents(settings: data.DocumentData, path: str) -> Read:
    """A text file as one document; or one of every line of JSONL."""
    if path.removesuffix(".gz").endswith(".jsonl"):
        yield from read_records(path, settings.obtain, None, settings.field)
        return
    found = read_lines(path, settings.obtain)
    for number, line in enumerate(found, 1):
        if line is None:
            yield Dropped("undecodable", f"{path}:{number}")
    yield Example("", "".join(f"{line}\n" for line in found if line is not None), path)


def read_stories(settings: data.StoryData, path: str) -> Read:
    """Questions of bAbI, each with the story before it, and the answer. A number of 1 begins a new story.
    What follows an undecodable line of a story is dropped with it: it may have said the answer."""
    for name, raw in open_stories(path, settings):
        story: list[str] = []
        whole = True
        for number, line in enumerate(drop_trailing_blanks(split_lines(raw)), 1):
            where = f"{name}:{number}"
            if line is None or not line.strip():
                whole = whole and line is not None
                yield Dropped("undecodable" if line is None else "empty", where)
                continue
            place, _, rest = line.strip().partition(" ")
            if not place.isdigit():
                raise DataError(f"{where} does not begin with a number, as every line of bAbI does: {line[:40]!r}.")
            if place == "1":
                story, whole = [], True
            question, *answer = (part.strip() for part in rest.split("\t"))
            if not answer:
                story.append(question)
            elif whole:
                yield Example(Question(question, " ".join(story)), answer[0], where)
            else:
                yield Dropped("after an undecodable line of its story", where)


TASK_FILE = re.compile(r"qa(\d{1,9})_.*train")


def open_stories(path: str, settings: data.StoryData) -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of a file, or of each file in an archive that is wanted: by task, and training files
    only (the others are named as tests)."""
    raw = read_bytes(path, settings.obtain)
    if not tarfile.is_tarfile(io.BytesIO(raw)):
        yield path, raw
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            files = [(Path(member.name).name, member) for member in archive.getmembers() if member.isfile()]
            wanted = [(int(match[1]), name, member) for name, member in files if (match := TASK_FILE.match(name))]
            for task, name, member in sorted(wanted, key=lambda one: one[0]):
                file = archive.extractfile(member)
                if file is not None and (not settings.tasks or task in settings.tasks):
                    yield f"{path}/{name}", file.read()
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is a damaged archive: {error}. Get it again.") from error


def read_squad(settings: data.SquadData, path: str) -> Read:
    """Questions of SQuAD's JSON with their context, the answer and where it begins. A question of several
    answers gives as many examples; one of none (SQuAD 2) is dropped."""
    text = decode_line(read_bytes(path, settings.obtain).removeprefix(MARK))
    if text is None:
        raise DataError(f"{path} is not UTF-8, as JSON has to be. Convert it: iconv -f ENCODING -t UTF-8 OLD > NEW.")
    tree = parse_object(text, path)
    for a, article in enumerate(get_list(tree, "data", path)):
        for p, paragraph in enumerate(get_list(article, "paragraphs", f"{path}: data[{a}]")):
            where = f"{path}: data[{a}].paragraphs[{p}]"
            context = get_text(paragraph, "context", where)
            for q, asked in enumerate(get_list(paragraph, "qas", where)):
                place = f"{where}.qas[{q}]"
                question = " ".join(get_text(asked, "question", place).split())
                found = get_list(asked, "answers", place)
                if not found:
                    yield Dropped("no answer", place)
                for answer in {get_text(one, "text", place): one for one in found}.values():
                    start = answer.get("answer_start")
                    start = start if isinstance(start, int) else None
                    yield Example(Question(question, context), answer["text"], place, start)


def read_each(read: Callable[[Any, str], Read]) -> Callable[[Any, Any], Read]:
    """A reader of several files, of one that reads a single file."""
    return lambda settings, paths: itertools.chain.from_iterable(read(settings, path) for path in paths)


class Format(NamedTuple):
    """One kind of data file: how a split of it is read, and how splits are cut from training."""

    read: Callable[[Any, Any], Read]
    cut: Callable[[Any, Splits], None] = cut_sources


FORMATS: dict[str, Format] = {
    "parallel": Format(read_parallel),
    "tsv": Format(read_each(read_table)),
    "csv": Format(read_each(read_table)),
    "jsonl": Format(read_each(read_objects)),
    "labelled": Format(read_each(read_labelled)),
    "babi": Format(read_each(read_stories)),
    "squad": Format(read_each(read_squad)),
    "columns": Format(read_each(read_columns)),
    "conllu": Format(read_each(read_conllu)),
    "text": Format(read_each(read_documents), cut_shares),
    "captions": Format(read_captions),
}
"""By `data.kind`."""
