"""Files -> raw examples, format by format: pairs, labels, stories, questions, documents.

A byte order mark and CRLF are taken off; a line that is not UTF-8 comes as ("undecodable", where), and so does whatever
else cannot be an example, with its reason: data.py keeps the ledger. A file in UTF-16 is refused.
"""

import csv
import gzip
import io
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regard.config.data import (
    DocumentData,
    FileData,
    JsonData,
    LabelledData,
    ParallelData,
    Sides,
    SquadData,
    StoryData,
    TableData,
)
from regard.errors import DataError

MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8."""


class Example(NamedTuple):
    """One pair, and where it came from (`file:line`)."""

    source: str
    target: str
    where: str
    start: int | None = None
    """Of an answer that is a span: its place in the context."""


def pairs(settings: FileData, files: Any) -> Iterator[Example | tuple[str, str]]:
    """The pairs of one split in the format of the settings; a bad line comes as (reason, where)."""
    match settings, files:
        case ParallelData(), Sides():
            yield from parallel(files, settings.obtain)
        case TableData(), _:
            for path in files:
                yield from table(path, settings)
        case JsonData(), _:
            for path in files:
                yield from records(path, settings.obtain, settings.source, settings.target)
        case LabelledData(), _:
            for path in files:
                yield from labelled(path, settings.obtain)
        case StoryData(), _:
            for path in files:
                yield from stories(path, settings)
        case SquadData(), _:
            for path in files:
                yield from answers(path, settings.obtain)
        case DocumentData(), _:
            for path in files:
                yield from documents(path, settings)


def lines(path: str, obtain: str = "") -> list[str | None]:
    """The lines of a text file, gzipped or not, without their ends; None where a line is not UTF-8."""
    return separated(content(path, obtain))


def separated(raw: bytes) -> list[str | None]:
    """As `lines`, of the bytes of a file."""
    found = raw.removeprefix(MARK).split(b"\n")
    if found[-1].strip() == b"":
        found.pop()
    return [decoded(line.removesuffix(b"\r")) for line in found]


def content(path: str, obtain: str = "") -> bytes:
    """The bytes of a file; unzipped when they begin as gzip does."""
    hint = f" {obtain}" if obtain else ""
    try:
        raw = Path(path).read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist.{hint}") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a directory, expected a file.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged gzip data: {error}. Fetch it again.{hint}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    if not raw.strip():
        raise DataError(f"{path} is empty.{hint}")
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16, expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW.")
    return raw


def blank(line: str | None) -> bool:
    """Whether a line is readable and says nothing."""
    return line is not None and not line.strip()


def filled(found: list[str | None]) -> list[str | None]:
    """The same lines, without blank ones at the end."""
    while found and blank(found[-1]):
        found.pop()
    return found


def decoded(line: bytes) -> str | None:
    """A line as text, or None."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return None


def parallel(sides: Sides, obtain: str) -> Iterator[Example | tuple[str, str]]:
    """Lines that belong together, from the files of two sides."""
    if len(sides.source) != len(sides.target):
        raise DataError(
            f"{len(sides.source)} source files but {len(sides.target)} target files: every file needs its partner."
        )
    for left, right in zip(sides.source, sides.target, strict=True):
        sources, targets = lines(left, obtain), lines(right, obtain)
        shorter = min(len(sources), len(targets))
        while shorter and blank(sources[shorter - 1]) and blank(targets[shorter - 1]):
            shorter -= 1
        if all(map(blank, sources[shorter:])) and all(map(blank, targets[shorter:])):
            del sources[shorter:], targets[shorter:]
        if len(sources) != len(targets):
            raise DataError(
                f"{left} has {len(sources):,} lines but {right} has {len(targets):,}: "
                "line n of one must belong to line n of the other. Nothing was read."
            )
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
            where = f"{left}:{number}"
            if source is None or target is None:
                yield "undecodable", where if source is None else f"{right}:{number}"
            else:
                yield Example(source, target, where)


def table(path: str, settings: TableData) -> Iterator[Example | tuple[str, str]]:
    """Rows of a tab- or comma-separated file. Tabs separate as they are; commas follow the quoting rules of CSV. A row
    that goes on behind the last column of the first one, as with a separator in its text, is not cut but dropped."""
    rows = tsv_rows(path, settings.obtain) if settings.kind == "tsv" else csv_rows(path, settings.obtain)
    columns: tuple[int, int] | None = None
    if isinstance(settings.source, int) and isinstance(settings.target, int):
        columns = (settings.source, settings.target)
    width = 0
    for number, row in rows:
        where = f"{path}:{number}"
        empty = row is not None and not any(cell.strip() for cell in row)
        width = width or (0 if empty else len(row or ()))
        if columns is None:
            columns = (column(settings.source, row, path), column(settings.target, row, path))
        elif row is None:
            yield "undecodable", where
        elif empty:
            yield "empty", where
        elif len(row) <= max(columns):
            wanted = max(columns) + 1
            raise DataError(f"{where} has {len(row)} columns, expected at least {wanted} ({settings.kind}).")
        elif any(cell.strip() for cell in row[width:]):
            yield "more columns than the first row", where
        else:
            yield Example(row[columns[0]], row[columns[1]], where)


def column(wanted: str | int, header: list[str] | None, path: str) -> int:
    """The number of a column that is given by number or by its name in the header."""
    if isinstance(wanted, int):
        return wanted
    if header is None or wanted not in header:
        raise DataError(f"{path}:1 has no column {wanted!r}. Its header is {', '.join(header or ['undecodable'])}.")
    return header.index(wanted)


def tsv_rows(path: str, obtain: str) -> Iterator[tuple[int, list[str] | None]]:
    for number, line in enumerate(filled(lines(path, obtain)), 1):
        yield number, None if line is None else line.split("\t")


def csv_rows(path: str, obtain: str) -> Iterator[tuple[int, list[str] | None]]:
    """Rows of a CSV file: a quoted field may hold line ends, so lines cannot be decoded one by one; a byte that is
    not UTF-8 becomes a lone surrogate, and its row counts as undecodable."""
    text = content(path, obtain).decode("utf-8-sig", "surrogateescape").rstrip() + "\n"
    csv.field_size_limit(2**31 - 1)  # the library's own limit is 131,072 characters: a document may be longer
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number = 1
    try:
        for row in reader:
            bad = any("\udc80" <= letter <= "\udcff" for cell in row for letter in cell)
            yield number, None if bad else row
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{number} is not CSV: {error}.") from error


def records(path: str, obtain: str, source: str | None, target: str) -> Iterator[Example | tuple[str, str]]:
    """Objects of a JSONL file, a field a side; a document has no source."""
    for number, line in enumerate(filled(lines(path, obtain)), 1):
        where = f"{path}:{number}"
        if line is None:
            yield "undecodable", where
        elif not line.strip():
            yield "empty", where
        else:
            record = parsed(line, where)
            left = "" if source is None else worded(record, source, where)
            yield Example(left, worded(record, target, where), where)


def parsed(line: str, where: str) -> dict[str, Any]:
    """One JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is JSON but no object: expected {{...}} with one field a side.")
    return record


def worded(record: Any, name: str, where: str) -> str:
    """The text in a field of a JSON object."""
    if not isinstance(record, dict):
        raise DataError(f"{where} is JSON but no object: expected {{...}} with the field {name!r}.")
    value = record.get(name)
    if value is None:
        raise DataError(f"{where} has no text in field {name!r}. Its fields are {', '.join(record) or 'none'}.")
    if not isinstance(value, str):
        came = json.dumps(value, ensure_ascii=False)
        hint = " Several labels are one text, with text.target.separator between them." * isinstance(value, list)
        raise DataError(
            f"{where} has {came if len(came) <= 40 else f'{came[:39]}…'} in field {name!r}, expected a text in "
            f"quotes.{hint}"
        )
    return value


def labelled(path: str, obtain: str) -> Iterator[Example | tuple[str, str]]:
    """Lines `label text`: a space or a tab stands between the two."""
    for number, line in enumerate(filled(lines(path, obtain)), 1):
        where = f"{path}:{number}"
        if line is None:
            yield "undecodable", where
        else:
            label, *text = re.split(r"[ \t]", line.strip(), maxsplit=1)
            yield Example("".join(text), label, where)


def documents(path: str, settings: DocumentData) -> Iterator[Example | tuple[str, str]]:
    """A text file as one document; or one of every line of JSONL."""
    if path.removesuffix(".gz").endswith(".jsonl"):
        yield from records(path, settings.obtain, None, settings.field)
        return
    found = lines(path, settings.obtain)
    for number, line in enumerate(found, 1):
        if line is None:
            yield "undecodable", f"{path}:{number}"
    yield Example("", "".join(f"{line}\n" for line in found if line is not None), path)


def stories(path: str, settings: StoryData) -> Iterator[Example | tuple[str, str]]:
    """Questions of bAbI: `question <tab> the story before it` -> the answer. A number of 1 begins a new story.
    What follows an undecodable line of a story is dropped with it: it may have said the answer."""
    for name, raw in story_files(path, settings):
        story: list[str] = []
        whole = True
        for number, line in enumerate(filled(separated(raw)), 1):
            where = f"{name}:{number}"
            if line is None or not line.strip():
                whole = whole and line is not None
                yield "undecodable" if line is None else "empty", where
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
                yield Example(f"{question}\t{' '.join(story)}", answer[0], where)
            else:
                yield "after an undecodable line of its story", where


def story_files(path: str, settings: StoryData) -> Iterator[tuple[str, bytes]]:
    """The name and the bytes of a file, or of each file in an archive that is wanted: by task, and training files
    only (the others are named as tests)."""
    raw = content(path, settings.obtain)
    if not tarfile.is_tarfile(io.BytesIO(raw)):
        yield path, raw
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            files = [(TASK.match(Path(member.name).name), member) for member in archive.getmembers() if member.isfile()]
            wanted = [(int(match[1]), member) for match, member in files if match]
            for task, member in sorted(wanted, key=lambda pair: pair[0]):
                file = archive.extractfile(member)
                if file is not None and (not settings.tasks or task in settings.tasks):
                    yield f"{path}/{Path(member.name).name}", file.read()
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is a damaged archive: {error}. Get it again.") from error


TASK = re.compile(r"qa(\d{1,9})_.*train")


def answers(path: str, obtain: str) -> Iterator[Example | tuple[str, str]]:
    """Questions of SQuAD's JSON: `question <tab> context` -> the answer and where it begins. A question of several
    answers gives as many examples; one of none (SQuAD 2) is dropped."""
    text = decoded(content(path, obtain).removeprefix(MARK))
    if text is None:
        raise DataError(f"{path} is not UTF-8, as JSON has to be. Convert it: iconv -f ENCODING -t UTF-8 OLD > NEW.")
    tree = parsed(text, path)
    for a, article in enumerate(listed(tree, "data", path)):
        for p, paragraph in enumerate(listed(article, "paragraphs", f"{path}: data[{a}]")):
            where = f"{path}: data[{a}].paragraphs[{p}]"
            context = worded(paragraph, "context", where)
            for q, asked in enumerate(listed(paragraph, "qas", where)):
                place = f"{where}.qas[{q}]"
                question = " ".join(worded(asked, "question", place).split())
                found = listed(asked, "answers", place)
                if not found:
                    yield "no answer", place
                for answer in {worded(one, "text", place): one for one in found}.values():
                    start = answer.get("answer_start")
                    yield Example(
                        f"{question}\t{context}", answer["text"], place, start if isinstance(start, int) else None
                    )


def listed(tree: Any, name: str, where: str) -> list[Any]:
    """A list in a field of a JSON object."""
    value = tree.get(name) if isinstance(tree, dict) else None
    if not isinstance(value, list):
        fields = ", ".join(tree) if isinstance(tree, dict) else "none: it is no object"
        raise DataError(f"{where} has no list in field {name!r}. Its fields are {fields}.")
    return value
