"""Tagged words, a line a word: columns as in CoNLL's shared tasks, and the treebanks of Universal Dependencies."""

from collections.abc import Iterator, Sequence
from typing import Any

from regard.config.data import ColumnsData, ConlluData
from regard.data.examples import Dropped, Example, Words
from regard.data.files import read_lines
from regard.errors import DataError

Read = Iterator[Example | Dropped]
NOTHING = (None, "", "_")
"""What stands in a field of CoNLL-U that says nothing."""


def read_blocks(path: str, obtain: str) -> Iterator[tuple[int, list[str] | None]]:
    """The lines of every sentence, with the number of its first; None where one of them is not UTF-8."""
    lines: list[str | None] = []
    for number, line in enumerate([*read_lines(path, obtain), ""], 1):
        if line is None or line.strip():
            lines.append(line)
        elif lines:
            whole = [one for one in lines if one is not None]
            yield number - len(lines), whole if len(whole) == len(lines) else None
            lines = []


def read_columns(settings: ColumnsData, path: str) -> Read:
    """Sentences of words with their tags, and a blank line behind each."""
    for begin, lines in read_blocks(path, settings.obtain):
        where = f"{path}:{begin}"
        if lines is None:
            yield Dropped("undecodable", where)
            continue
        rows = [split_columns(line, settings, f"{path}:{number}") for number, line in enumerate(lines, begin)]
        words = tuple(cells[settings.word] for cells in rows)
        columns = tuple(tuple(cells[column] for column in settings.features.values()) for cells in rows)
        yield Example(Words(words, columns), " ".join(cells[settings.tag] for cells in rows), where)


def split_columns(line: str, settings: ColumnsData, where: str) -> list[str]:
    """The columns of a line; those that are wanted must be there, and say something."""
    cells = line.split("\t") if "\t" in line else line.split()
    wanted = {"word": settings.word, "tag": settings.tag}
    named = {f"data.features.{name}": column for name, column in settings.features.items()}
    for name, column in {**{f"data.{name}": column for name, column in wanted.items()}, **named}.items():
        if not -len(cells) <= column < len(cells):
            raise DataError(f"{where} has {len(cells)} columns, but {name} is column {column}: {line[:60]!r}.")
        if not cells[column].strip():
            raise DataError(f"{where} has nothing in column {column}, which is {name}: {line[:60]!r}.")
    return cells


def read_conllu(settings: ConlluData, path: str) -> Read:
    """Sentences of a CoNLL-U file. Words that stand for several (1-2) and empty ones (8.1) are left out, as taggers do;
    a word without the tag or a field that is wanted drops its sentence."""
    for begin, lines in read_blocks(path, settings.obtain):
        where = f"{path}:{begin}"
        tokens = None if lines is None else parse_sentence(lines, where)
        if tokens is None:
            yield Dropped("undecodable", where)
        elif missing := [
            name for name in (settings.tag, *settings.features) for one in tokens if one.get(name) in NOTHING
        ]:
            yield Dropped(f"no {missing[0]}", where)
        else:
            columns = tuple(tuple(str(token[name]) for name in settings.features) for token in tokens)
            tags = " ".join(str(token[settings.tag]) for token in tokens)
            yield Example(Words(tuple(token["form"] for token in tokens), columns), tags, where)


def parse_sentence(lines: Sequence[str], where: str) -> list[dict[str, Any]]:
    """The words of a sentence, by the names of CoNLL-U's fields."""
    import conllu

    try:
        found = conllu.parse("\n".join(lines) + "\n\n")
    except conllu.exceptions.ParseException as error:
        raise DataError(f"{where} is not CoNLL-U: {error}.") from error
    words: list[dict[str, Any]] = [token for sentence in found for token in sentence if isinstance(token["id"], int)]
    if not words:
        raise DataError(f"{where} is not CoNLL-U: a sentence without words.")
    return words
