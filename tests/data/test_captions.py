"""Captioned images: three forms of captions, lists, and a ledger that names everything that was left out."""

import gzip
import io
import json
import struct
import zipfile
import zlib
from unittest.mock import ANY

import pytest
from PIL import Image as Pillow

from regard.config.data import CaptionData
from regard.data.encoding import open_files
from regard.data.examples import Image
from regard.data.splits import read_splits
from regard.errors import DataError

CAPTIONS = {
    "a.jpg": ["A dog runs .", "The dog is fast"],
    "b.jpg": ["A cat sleeps ."],
    "c.jpg": ["Nobody is here ."],
}


def picture(kind="JPEG", size=(9, 7)):
    file = io.BytesIO()
    Pillow.effect_noise(size, 90).convert("RGB").save(file, kind)
    return file.getvalue()


def make_png(width, height):
    """A PNG file whose header says what it likes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [b"IHDR" + header, b"IDAT" + zlib.compress(b"0"), b"IEND"]
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name in CAPTIONS:
        (folder / name).write_bytes(picture())
    return tmp_path


def as_tokens(captions):
    return "".join(
        f"{name}#{number}\t{text}\n" for name, texts in captions.items() for number, text in enumerate(texts)
    )


def as_csv(captions):
    rows = [f'{name},"{text}"' for name, texts in captions.items() for text in texts]
    return "\n".join(["image,caption", *rows, ""])


def as_coco(captions):
    ids = {name: 100 + number for number, name in enumerate(captions)}
    images = [{"id": ids[name], "file_name": name} for name in captions]
    said = [{"image_id": ids[name], "caption": text} for name, texts in captions.items() for text in texts]
    return json.dumps({"images": images, "annotations": said})


def as_karpathy(captions, splits=("train", "val", "train")):
    images = [
        {"filename": name, "split": split, "sentences": [{"raw": text} for text in texts]}
        for (name, texts), split in zip(captions.items(), splits, strict=True)
    ]
    return json.dumps({"images": images})


def read(place, only=None, **changes):
    """The splits of captions."""
    open_files.cache_clear()
    settings = {"kind": "captions", "images": (str(place / "images"),), "train": (), **changes}
    found = read_splits(CaptionData(**settings), 1, lambda example: example, only)
    return found, {name: ledger.dropped for name, ledger in found.ledgers.items()}


def write(place, name, text):
    path = place / name
    path.write_text(text, encoding="utf-8")
    return (str(path),)


def list_pairs(examples):
    return [(example.source.name, example.target) for example in examples]


EVERY = [(name, text) for name, texts in CAPTIONS.items() for text in texts]


@pytest.mark.parametrize("form", [as_tokens, as_csv, as_coco, as_karpathy])
def test_every_form_says_the_same(form, place):
    found, dropped = read(place, train=write(place, "captions.txt", form(CAPTIONS)))
    assert list_pairs(found.train) == EVERY
    assert not any(dropped.values())
    assert found.train[0].source == Image("a.jpg", str(place / "images"))
    assert found.train[0].where.startswith(f"{place / 'captions.txt'}:")


def test_lists_split_gzipped_captions_of_a_zip(place):
    (place / "captions.txt.gz").write_bytes(gzip.compress(as_tokens(CAPTIONS).encode()))
    with zipfile.ZipFile(place / "images.zip", "w") as archive:
        for name in CAPTIONS:
            archive.writestr(f"inside/{name}", picture())
    lists = {"train": write(place, "train.txt", "c.jpg\na.jpg\n"), "valid": write(place, "valid.txt", "b.jpg\n")}
    given = {"images": (str(place / "images.zip"),), "captions": (str(place / "captions.txt.gz"),)}
    found, dropped = read(place, **lists, **given)
    assert list_pairs(found.train) == [EVERY[3], EVERY[0], EVERY[1]]
    assert list_pairs(found.valid) == [EVERY[2]]
    assert not any(dropped.values())
    only, _ = read(place, only="valid", **lists, **given)
    assert (only.train, list_pairs(only.valid)) == ([], [EVERY[2]])


def test_splits_of_karpathys_form(place):
    (path,) = write(place, "dataset.json", as_karpathy(CAPTIONS))
    found, _ = read(place, train=(f"{path}#train",), valid=(f"{path}#val",))
    assert [example.source.name for example in found.train] == ["a.jpg", "a.jpg", "c.jpg"]
    assert [example.source.name for example in found.valid] == ["b.jpg"]


def test_images_can_be_cut_off_for_validation(place):
    found, _ = read(place, train=write(place, "captions.csv", as_csv(CAPTIONS)), cut_valid=1)
    assert len({example.source for example in found.valid}) == 1
    assert not {example.source for example in found.valid} & {example.source for example in found.train}


# --- what is left out, by name ---------------------------------------------------------------------------------------


def test_captions_without_images_and_images_without_captions(place):
    (place / "images" / "silent.png").write_bytes(picture("PNG"))
    more = CAPTIONS | {"gone.jpg": ["It is gone ."]}
    found, dropped = read(place, train=write(place, "captions.txt", as_tokens(more)))
    assert list_pairs(found.train) == EVERY
    assert dropped["train"] == {
        "image without caption": [f"{place / 'images'}: silent.png"],
        "caption without image": [f"{place / 'captions.txt'}:5 (gone.jpg)"],
    }


def test_lists_with_names_that_nobody_knows_or_everybody(place):
    lists = write(place, "train.txt", "a.jpg\nmissing.jpg\na.jpg\n\nb.jpg\n")
    found, dropped = read(place, train=lists, captions=write(place, "captions.txt", as_tokens(CAPTIONS)))
    assert list_pairs(found.train) == EVERY[:3]
    assert dropped["train"] == {
        "image without caption": [f"{lists[0]}:2 (missing.jpg)"],
        "listed twice": [f"{lists[0]}:3 (a.jpg)"],
    }


def test_annotations_of_images_that_are_not_listed(place):
    tree = json.loads(as_coco(CAPTIONS))
    tree["annotations"][2]["image_id"] = 7
    tree["images"].append({"id": 999, "file_name": "a.jpg"})
    (path,) = write(place, "coco.json", json.dumps(tree))
    found, dropped = read(place, train=(path,), valid=write(place, "valid.txt", "b.jpg#0\tA cat\n"))
    assert list_pairs(found.train) == [EVERY[0], EVERY[1], EVERY[3]]
    assert dropped["train"] == {
        "listed twice": [f"{path}: images[3] (a.jpg)"],
        "caption without image": [f"{path}: annotations[2] (image_id 7)"],
        "image without caption": [f"{path}: b.jpg", f"{path}: a.jpg"],
    }


def test_unreadable_images_are_named_once(place):
    cut, large = picture(size=(64, 64)), make_png(8_000, 8_000)
    bad = {"cut.jpg": cut[: len(cut) // 2], "empty.jpg": b"", "text.jpg": b"hello", "large.png": large}
    for name, data in bad.items():
        (place / "images" / name).write_bytes(data)
    more = CAPTIONS | {name: ["one .", "two ."] for name in bad}
    found, dropped = read(place, train=write(place, "captions.txt", as_tokens(more)))
    assert list_pairs(found.train) == EVERY
    assert dropped["train"]["unreadable image"][0].startswith("cut.jpg is cut short or damaged: ")
    assert dropped["train"]["unreadable image"] == [
        ANY,
        "empty.jpg is empty (0 bytes), expected an image.",
        "text.jpg is not an image, expected JPEG, PNG, GIF, BMP, WebP or TIFF.",
        "large.png has 8,000 x 8,000 pixels, expected at most 50,000,000 in all. Shrink it.",
    ]
    assert found.ledgers["train"].read == 8


def test_one_name_in_two_folders_is_refused(place):
    (place / "others").mkdir()
    (place / "others" / "a.jpg").write_bytes(picture())
    folders = (str(place / "images"), str(place / "others"))
    with pytest.raises(DataError, match=r"images and .*others both have an image a\.jpg .*: which one is meant\?"):
        read(place, train=write(place, "captions.txt", as_tokens(CAPTIONS)), images=folders)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (as_tokens, r"only files in Karpathy's form have splits \(#train\)"),
        (as_csv, r"only files in Karpathy's form have splits \(#train\)"),
        (as_coco, r"is in COCO's form, which has no splits \(#train\)"),
    ],
)
def test_a_split_of_a_file_that_has_none_is_refused(place, form, message):
    (path,) = write(place, "captions.txt", form(CAPTIONS))
    with pytest.raises(DataError, match=message):
        read(place, train=(f"{path}#train",))


def test_images_of_coco_are_known_by_a_number(place):
    (path,) = write(place, "captions.json", json.dumps({"images": [{"file_name": "a.jpg"}], "annotations": []}))
    with pytest.raises(DataError, match=r"images\[0\] has id None, expected the number of an image"):
        read(place, train=(path,))
    tree = {"images": [{"file_name": "a.jpg", "id": 1}], "annotations": [{"caption": "one"}]}
    (path,) = write(place, "captions.json", json.dumps(tree))
    with pytest.raises(DataError, match=r"annotations\[0\] has image_id None"):
        read(place, train=(path,))


def test_a_number_sign_may_be_part_of_a_name(place):
    (place / "images" / "x#2.jpg").write_bytes(picture())
    found, _ = read(place, train=write(place, "captions.txt", "x#2.jpg#0\ta thing\nx#2.jpg\tanother\n"))
    assert list_pairs(found.train) == [("x#2.jpg", "a thing"), ("x#2.jpg", "another")]


def test_lines_that_are_no_captions(place):
    text = "a.jpg#0\tA dog .\nno tab\n\tno name\nb.jpg#0\t \n"
    found, dropped = read(place, train=write(place, "captions.txt", text), images=(str(place / "images"),))
    assert list_pairs(found.train) == [("a.jpg", "A dog .")]
    path = place / "captions.txt"
    assert dropped["train"]["not name#number, a tab, a caption"] == [f"{path}:2", f"{path}:3"]
    assert dropped["train"]["empty"] == [f"{path}:4"]
    rows = "image,caption\na.jpg,A dog .\nb.jpg\nc.jpg,\n"
    found, dropped = read(place, train=write(place, "captions.csv", rows))
    assert list_pairs(found.train) == [("a.jpg", "A dog .")]
    assert dropped["train"]["too few columns"] == [f"{place / 'captions.csv'}:3"]
    assert dropped["train"]["empty"] == [f"{place / 'captions.csv'}:4"]


def test_columns_by_number_have_no_header(place):
    (path,) = write(place, "captions.csv", "1,A dog .,a.jpg\n")
    found, _ = read(place, train=(path,), image=2, caption=1)
    assert list_pairs(found.train) == [("a.jpg", "A dog .")]


def test_what_cannot_be_read_at_all(place):
    with pytest.raises(DataError, match=r"captions.csv:1 has no column 'image'. Its header is file, text."):
        read(place, train=write(place, "captions.csv", "file,text\na.jpg,A dog\n"))
    with pytest.raises(DataError, match=r"gone.json does not exist"):
        read(place, train=(str(place / "gone.json"),))
    with pytest.raises(DataError, match="has no list in field 'images'"):
        read(place, train=write(place, "other.json", '{"data": []}'))
    with pytest.raises(DataError, match="nowhere does not exist, expected a folder or a zip of images"):
        read(place, train=write(place, "captions.txt", as_tokens(CAPTIONS)), images=(str(place / "nowhere"),))
    inside = place / "images" / "more"
    inside.mkdir()
    for folder in ("x", "y"):
        (inside / folder).mkdir()
        (inside / folder / "twin.jpg").write_bytes(picture())
    with pytest.raises(DataError, match=r"has 2 files called twin.jpg \(.*\): name their folders"):
        read(place, train=write(place, "captions.txt", "twin.jpg#0\tWho ?\n"))
    with zipfile.ZipFile(place / "bad.zip", "w") as archive:
        archive.writestr("../a.jpg", picture())
    with pytest.raises(DataError, match=r"has a file called '../a.jpg', expected names inside the archive"):
        read(place, train=write(place, "captions.txt", as_tokens(CAPTIONS)), images=(str(place / "bad.zip"),))
