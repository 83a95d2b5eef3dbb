"""Captioned images: files of captions in three forms, lists of names, and the images themselves.

Several captions of one image are as many examples. What has no image, no caption, or an image that cannot be read is
dropped once, by name.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from regard.config.data import CaptionData
from regard.data.examples import Dropped, Example, Image
from regard.data.files import (
    MARK,
    decode_line,
    drop_trailing_blanks,
    find_column,
    get_list,
    get_text,
    parse_object,
    read_bytes,
    read_csv_rows,
    read_lines,
)
from regard.data.images.pixels import check_image, open_files
from regard.errors import DataError


class Caption(NamedTuple):
    """What is said of an image, and where it stands."""

    name: str
    text: str
    where: str


def read_captions(settings: CaptionData, paths: Iterable[str]) -> Iterator[Example | Dropped]:
    """The captions of a split: of the images that lists name, or all of caption files."""
    paths = list(paths)
    found: dict[str, list[Caption]] = {}
    names: dict[str, str] = {}  # -> where it is said
    for one in gather_captions(settings, settings.captions or paths):
        if isinstance(one, Dropped):
            yield one
        else:
            found.setdefault(one.name, []).append(one)
    if settings.captions:
        for name, where in read_names(settings, paths):
            if name in names:
                yield Dropped("listed twice", f"{where} ({name})")
            elif name not in found:
                yield Dropped("image without caption", f"{where} ({name})")
            names.setdefault(name, where)
    else:
        names = {name: captions[0].where for name, captions in found.items()}
        if paths == list(settings.train):
            yield from find_uncaptioned(settings, set(found))
    for name, where in names.items():
        yield from read_examples(settings, name, where, found.get(name, []))


def read_examples(settings: CaptionData, name: str, where: str, captions: list[Caption]) -> Iterator[Example | Dropped]:
    """The examples of one image; nothing for one without captions."""
    places = [place for place in settings.images if open_files(place).find(name)]
    if not captions:
        return
    if not places:
        yield Dropped("caption without image", f"{where} ({name})")
        return
    if len(places) > 1:
        raise DataError(f"{' and '.join(places)} both have an image {name} ({where}): which one is meant? Rename one.")
    (place,) = places
    try:
        check_image(open_files(place).read(name), name)
    except DataError as error:
        yield Dropped("unreadable image", str(error))
        return
    for caption in captions:
        yield Example(Image(name, place), " ".join(caption.text.split()), caption.where)


def find_uncaptioned(settings: CaptionData, known: set[str]) -> Iterator[Dropped]:
    """Images that no caption of any split speaks of."""
    others = [*settings.valid, *settings.test]
    known |= {one.name for one in gather_captions(settings, others) if isinstance(one, Caption)}
    for place in settings.images:
        files = open_files(place)
        whole = {files.find(name) for name in known}
        yield from (Dropped("image without caption", f"{place}: {name}") for name in files.names() if name not in whole)


def read_names(settings: CaptionData, paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names of images that lists have, a line each, and where."""
    for path in paths:
        for number, line in enumerate(read_lines(path, settings.obtain), 1):
            if line is None:
                raise DataError(f"{path}:{number} is not UTF-8, expected the name of an image.")
            if line.strip():
                yield line.strip(), f"{path}:{number}"


def gather_captions(settings: CaptionData, paths: Iterable[str]) -> Iterator[Caption | Dropped]:
    """The captions of files, each in its form: JSON, Flickr's (name#number, a tab, the caption), or CSV."""
    for path in paths:
        file, split = part_split(path)
        raw = read_bytes(file, settings.obtain).removeprefix(MARK).lstrip()
        if split and raw[:1] != b"{":
            raise DataError(f"{path}: only files in Karpathy's form have splits (#{split}), and {file} is none.")
        if raw[:1] in (b"{", b"["):
            yield from read_json(file, raw, split)
        elif b"\t" in raw.partition(b"\n")[0]:
            yield from read_tokens(file, settings.obtain)
        else:
            yield from read_rows(settings, file)


def part_split(path: str) -> tuple[str, str]:
    """A file, and the split of it that is wanted: dataset.json#train."""
    file, mark, split = path.rpartition("#")
    return (file, split) if mark and not Path(path).exists() else (path, "")


def read_tokens(path: str, obtain: str) -> Iterator[Caption | Dropped]:
    """Flickr's form."""
    for number, line in enumerate(drop_trailing_blanks(read_lines(path, obtain)), 1):
        where = f"{path}:{number}"
        name, tab, text = (line or "").partition("\t")
        if line is None:
            yield Dropped("undecodable", where)
        elif not tab or not name.strip():
            yield Dropped("not name#number, a tab, a caption", where)
        elif not text.strip():
            yield Dropped("empty", where)
        else:
            yield Caption(re.sub(r"#\d+$", "", name.strip()), text, where)


def read_rows(settings: CaptionData, path: str) -> Iterator[Caption | Dropped]:
    """CSV, with a header unless its columns are given by number."""
    wanted = (settings.image, settings.caption)
    columns = None if any(isinstance(one, str) for one in wanted) else wanted
    for number, row in read_csv_rows(path, settings.obtain):
        where = f"{path}:{number}"
        if columns is None:
            columns = find_column(wanted[0], row, path), find_column(wanted[1], row, path)
        elif row is None:
            yield Dropped("undecodable", where)
        elif len(row) <= max(map(int, columns)):
            yield Dropped("too few columns", where)
        elif not all(row[int(column)].strip() for column in columns):
            yield Dropped("empty", where)
        else:
            yield Caption(row[int(columns[0])].strip(), row[int(columns[1])], where)


def read_json(path: str, raw: bytes, split: str) -> Iterator[Caption | Dropped]:
    """COCO's form, images and annotations; or Karpathy's, images with their sentences and perhaps a split."""
    text = decode_line(raw)
    if text is None:
        raise DataError(f"{path} is not UTF-8, as JSON has to be.")
    tree = parse_object(text, path)
    images = get_list(tree, "images", path)
    if "annotations" not in tree:
        yield from read_karpathy(path, images, split)
        return
    if split:
        raise DataError(f"{path} is in COCO's form, which has no splits (#{split}): name a file for each.")
    names: dict[str, str] = {}
    listed = set()
    for number, image in enumerate(images):
        where = f"{path}: images[{number}]"
        name, identity = get_text(image, "file_name", where), get_identity(image, "id", where)
        if name in listed or identity in names:
            yield Dropped("listed twice", f"{where} ({name})")
        listed.add(name)
        names.setdefault(identity, name)
    spoken = set()
    for number, annotation in enumerate(get_list(tree, "annotations", path)):
        where = f"{path}: annotations[{number}]"
        caption = get_text(annotation, "caption", where)
        identity = get_identity(annotation, "image_id", where)
        spoken.add(identity)
        if identity in names:
            yield Caption(names[identity], caption, where)
        else:
            yield Dropped("caption without image", f"{where} (image_id {identity})")
    for identity, name in names.items():
        if identity not in spoken:
            yield Dropped("image without caption", f"{path}: {name}")


def get_identity(tree: dict[str, Any], name: str, where: str) -> str:
    """What an image is known by in COCO's form: a number, or a text."""
    value = tree.get(name)
    if not isinstance(value, int | str):
        raise DataError(f"{where} has {name} {value!r}, expected the number of an image.")
    return str(value)


def read_karpathy(path: str, images: list[Any], split: str) -> Iterator[Caption | Dropped]:
    """Images with their sentences, of one split if one is wanted."""
    names = set()
    for number, image in enumerate(images):
        where = f"{path}: images[{number}]"
        name = get_text(image, "filename", where)
        if split and get_text(image, "split", where) != split:
            continue
        if name in names:
            yield Dropped("listed twice", f"{where} ({name})")
            continue
        names.add(name)
        sentences = get_list(image, "sentences", where)
        if not sentences:
            yield Dropped("image without caption", f"{where} ({name})")
        for place, sentence in enumerate(sentences):
            inner = f"{where}.sentences[{place}]"
            yield Caption(name, get_text(sentence, "raw", inner), inner)
