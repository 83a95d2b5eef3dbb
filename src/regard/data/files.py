"""The bytes, the lines, the rows and the objects of files.

A byte order mark and CRLF are taken off; gzip is unzipped; a line that is not UTF-8 comes as None. UTF-16 is refused,
and so are files of another encoding and lines that end in a carriage return alone.
"""

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regard.errors import DataError

MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8."""


def read_lines(path: str, obtain: str = "") -> list[str | None]:
    """The lines of a text file, gzipped or not, without their ends; None where a line is not UTF-8."""
    raw = read_bytes(path, obtain)
    if b"\n" not in raw and b"\r" in raw.rstrip():
        convert = r"Convert it: tr '\r' '\n' < OLD > NEW."
        raise DataError(f"{path} has lines that end in CR alone, expected LF or CRLF. {convert}")
    found = split_lines(raw)
    check_encoding(path, found)
    return found


def check_encoding(path: str, lines: list[str | None]) -> None:
    """Refuse a file most of whose lines (of more than a few) are not UTF-8: it was written in another encoding."""
    if (bad := lines.count(None)) > max(9, len(lines) // 2):
        convert = "Convert it, as Korean from Windows: iconv -f CP949 -t UTF-8 OLD > NEW."
        raise DataError(f"{path} is not UTF-8 in {bad:,} of {len(lines):,} lines. {convert}")


def split_lines(raw: bytes) -> list[str | None]:
    """As `read_lines`, of the bytes of a file."""
    found = raw.removeprefix(MARK).split(b"\n")
    if found[-1].strip() == b"":
        found.pop()
    return [decode_line(line.removesuffix(b"\r")) for line in found]


def read_bytes(path: str, obtain: str = "") -> bytes:
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


def is_blank(line: str | None) -> bool:
    """Whether a line is readable and says nothing."""
    return line is not None and not line.strip()


def drop_trailing_blanks(found: list[str | None]) -> list[str | None]:
    """The same lines, without blank ones at the end."""
    while found and is_blank(found[-1]):
        found.pop()
    return found


def decode_line(line: bytes) -> str | None:
    """A line as text, or None."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return None


def find_column(wanted: str | int, header: list[str] | None, path: str) -> int:
    """The number of a column that is given by number or by its name in the header."""
    if isinstance(wanted, int):
        return wanted
    if header is None or wanted not in header:
        raise DataError(f"{path}:1 has no column {wanted!r}. Its header is {', '.join(header or ['undecodable'])}.")
    return header.index(wanted)


def read_csv_rows(path: str, obtain: str) -> Iterator[tuple[int, list[str] | None]]:
    """Rows of a CSV file: a quoted field may hold line ends, so lines cannot be decoded one by one; a byte that is
    not UTF-8 becomes a lone surrogate, and its row counts as undecodable."""
    raw = read_bytes(path, obtain)
    check_encoding(path, split_lines(raw))
    text = raw.decode("utf-8-sig", "surrogateescape").rstrip() + "\n"
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


def parse_object(line: str, where: str) -> dict[str, Any]:
    """One JSON object; a key that comes twice is refused, for one of its values would be lost."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise DataError(f"{where} has the field {twice!r} twice in one object. Remove one of them.")
        return found

    try:
        record = json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}.") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is JSON but no object: expected {{...}} with one field a side.")
    return record


def get_text(record: Any, name: str, where: str) -> str:
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


def get_list(tree: Any, name: str, where: str) -> list[Any]:
    """A list in a field of a JSON object."""
    value = tree.get(name) if isinstance(tree, dict) else None
    if not isinstance(value, list):
        fields = ", ".join(tree) if isinstance(tree, dict) else "none: it is no object"
        raise DataError(f"{where} has no list in field {name!r}. Its fields are {fields}.")
    return value
