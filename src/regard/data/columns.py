"""Tagged words, a line a word: columns as in CoNLL's shared tasks, and the treebanks of Universal Dependencies."""

from collections.abc import Iterator

from regard.config.data import ColumnsData, ConlluData
from regard.data.examples import Dropped, Example, Words
from regard.data.files import decode_line, read_bytes, read_lines
from regard.errors import DataError

Read = Iterator[Example | Dropped]


def read_columns(settings: ColumnsData, path: str) -> Read:
    """Sentences of words with their tags, and a blank line behind each. A sentence with a line that is not UTF-8 is
    dropped as a whole."""
    rows: list[list[str]] = []
    begin, whole = 1, True
    for number, line in enumerate([*read_lines(path, settings.obtain), ""], 1):
        whole = whole and line is not None
        if line is None or line.strip():
            begin = begin if rows else number
            rows.append([] if line is None else split_columns(line, settings, f"{path}:{number}"))
        elif rows:
            where = f"{path}:{begin}"
            yield make_example(rows, settings, where) if whole else Dropped("undecodable", where)
            rows, whole = [], True


def split_columns(line: str, settings: ColumnsData, where: str) -> list[str]:
    """The columns of a line; those that are wanted must be there."""
    cells = line.split("\t") if "\t" in line else line.split()
    for name, column in {"word": settings.word, "tag": settings.tag, **settings.features}.items():
        if not -len(cells) <= column < len(cells):
            raise DataError(
                f"{where} has {len(cells)} columns, but the {name} is column {column} (data.{name}): {line[:60]!r}."
            )
    return cells


def make_example(rows: list[list[str]], settings: ColumnsData, where: str) -> Example:
    """One sentence."""
    words = tuple(cells[settings.word] for cells in rows)
    columns = tuple(tuple(cells[column] for column in settings.features.values()) for cells in rows)
    return Example(Words(words, columns), " ".join(cells[settings.tag] for cells in rows), where)


def read_conllu(settings: ConlluData, path: str) -> Read:
    """Sentences of a CoNLL-U file. Words that stand for several (1-2) and empty ones (8.1) are left out, as taggers do;
    a word without the tag that is wanted drops its sentence."""
    import conllu

    text = decode_line(read_bytes(path, settings.obtain))
    if text is None:
        raise DataError(f"{path} is not UTF-8, as CoNLL-U has to be. Convert it: iconv -f ENCODING -t UTF-8 OLD > NEW.")
    begin = 1
    for block in text.split("\n\n"):
        where, begin = f"{path}:{begin}", begin + block.count("\n") + 2
        if not block.strip():
            continue
        try:
            tokens = [one for one in conllu.parse(block + "\n\n")[0] if isinstance(one["id"], int)]
        except (conllu.exceptions.ParseException, IndexError) as error:
            raise DataError(f"{where} is not CoNLL-U: {error or 'a sentence without words'}.") from error
        names = (settings.tag, *settings.features)
        if missing := [name for name in names for token in tokens if token.get(name) is None]:
            yield Dropped(f"no {missing[0]}", where)
            continue
        words = tuple(token["form"].replace(" ", "\u00a0") for token in tokens)
        columns = tuple(tuple(str(token[name]) for name in settings.features) for token in tokens)
        yield Example(Words(words, columns), " ".join(str(token[settings.tag]) for token in tokens), where)
