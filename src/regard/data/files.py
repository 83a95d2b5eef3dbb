"""The bytes and the lines of files.

A byte order mark and CRLF are taken off; gzip is unzipped; a line that is not UTF-8 comes as None. UTF-16 is refused,
and so are files of another encoding and lines that end in a carriage return alone.
"""

import gzip
import zlib
from pathlib import Path

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
