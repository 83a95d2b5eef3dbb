"""Files -> examples: every line is an example or in the ledger, and every refusal names its place."""

import gzip
import itertools
import json
import random
import typing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from regard.config.data import Data, FileData, GeneratedData, JsonData, LabelledData, ParallelData, Sides, TableData
from regard.data import formats, synthetic
from regard.data.cutting import cut
from regard.data.examples import Dropped, Example, Ledger, Splits
from regard.data.splits import join_sources, read_splits
from regard.errors import DataError
from regard.tasks.seq2seq import Seq2SeqTask

BOM = b"\xef\xbb\xbf"
HINT = "Get it there."
FORMATS = ("parallel", "tsv", "csv", "jsonl")


def read_files(data) -> Splits:
    """The splits of files, as a translation takes them."""
    return read_splits(data, 1, lambda example: Seq2SeqTask.accept(example, None))


class Folder:
    """Writes files and reads them as training data."""

    def __init__(self, path):
        self.path = path

    def write(self, name: str, content: bytes) -> str:
        (self.path / name).write_bytes(content)
        return str(self.path / name)

    def name(self, name: str) -> str:
        return str(self.path / name)

    def parallel(self, source: bytes, target: bytes, **more) -> Splits:
        sides = Sides(source=(self.write("s", source),), target=(self.write("t", target),))
        return read_files(ParallelData(kind="parallel", train=sides, **more))

    def table(self, kind: str, content: bytes, **more) -> Splits:
        return read_files(TableData(kind=kind, train=(self.write("s", content),), **more))

    def jsonl(self, content: bytes, **more) -> Splits:
        return read_files(JsonData(kind="jsonl", train=(self.write("s", content),), **more))

    def rows(self, kind: str, rows: list[tuple[bytes, bytes]], end: bytes = b"\n", first: bytes = b"") -> Splits:
        """The same rows of two cells, in any format."""
        if kind == "parallel":
            return self.parallel(*(first + b"".join(cell + end for cell in side) for side in zip(*rows, strict=True)))
        join = {"tsv": b"%b\t%b", "csv": b"%b,%b", "jsonl": b'{"source": "%b", "target": "%b"}'}[kind]
        content = first + b"".join((join % row if any(row) else b"") + end for row in rows)
        return self.jsonl(content) if kind == "jsonl" else self.table(kind, content)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def pairs(splits: Splits) -> list[tuple[str, str]]:
    return [(example.source, example.target) for example in splits.train]


def refusal(call, *arguments, **named) -> str:
    with pytest.raises(DataError) as caught:
        call(*arguments, **named)
    return str(caught.value)


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("first", [b"", BOM])
def test_line_ends_and_byte_order_mark_are_taken_off(folder, kind, end, first):
    splits = folder.rows(kind, [(b"ein Hund", b"a dog"), ("Öl".encode(), "기름".encode())], end, first)
    assert splits.train == [
        Example("ein Hund", "a dog", folder.name("s:1")),
        Example("Öl", "기름", folder.name("s:2")),
    ]
    assert splits.ledgers["train"] == Ledger(read=2, kept=2)
    assert (splits.valid, splits.test) == ([], [])


def test_last_line_needs_no_end(folder):
    assert pairs(folder.parallel(b"a\nb", b"c\nd\n")) == [("a", "c"), ("b", "d")]
    assert pairs(folder.table("tsv", b"a\tc\nb\td")) == [("a", "c"), ("b", "d")]
    assert pairs(folder.table("csv", b'a,c\nb,"d"')) == [("a", "c"), ("b", "d")]
    assert pairs(folder.jsonl(b'{"source": "a", "target": "c"}')) == [("a", "c")]


def test_only_line_feeds_end_lines(folder):
    odd = "a\u2028b\x85c\x0bd"
    assert pairs(folder.parallel(odd.encode(), b"x")) == [(odd, "x")]


def test_several_files_follow_one_another(folder):
    write = folder.write
    source, target = (write("s1", b"a\n"), write("s2", b"b\nc\n")), (write("t1", b"1\n"), write("t2", b"2\n3\n"))
    sides = Sides(source=source, target=target)
    found = read_files(ParallelData(kind="parallel", train=sides)).train
    assert [(e.source, e.target, e.where) for e in found] == [
        ("a", "1", folder.name("s1:1")),
        ("b", "2", folder.name("s2:1")),
        ("c", "3", folder.name("s2:2")),
    ]
    tables = (write("x", b"k\tv\na\t1\n"), write("y", b"v\tk\n2\tb\n"))
    splits = read_files(TableData(kind="tsv", train=tables, source="k", target="v"))
    assert pairs(splits) == [("a", "1"), ("b", "2")]


@pytest.mark.parametrize("kind", FORMATS)
def test_gzip_is_read_as_the_text_in_it(folder, kind):
    plain = folder.rows(kind, [(b"a", b"b"), (b"c", b"d")])
    for name in ("s", "t") if kind == "parallel" else ("s",):
        folder.write(name, gzip.compress((folder.path / name).read_bytes()))
    if kind == "parallel":
        settings = ParallelData(kind=kind, train=Sides(source=(folder.name("s"),), target=(folder.name("t"),)))
    else:
        settings = (JsonData if kind == "jsonl" else TableData)(kind=kind, train=(folder.name("s"),))
    assert read_files(settings) == plain


@pytest.mark.parametrize("kind", ["tsv", "csv"])
def test_columns_by_number_and_by_name(folder, kind):
    content = b"id\ten\tde\n1\ta dog\tein Hund\n2\ta cat\teine Katze\n"
    content = content if kind == "tsv" else content.replace(b"\t", b",")
    rows = [("ein Hund", "a dog"), ("eine Katze", "a cat")]
    assert pairs(folder.table(kind, content, source="de", target="en")) == rows
    assert pairs(folder.table(kind, content, source=2, target="en")) == rows
    assert pairs(folder.table(kind, content, source=2, target=1)) == [("de", "en"), *rows]
    assert folder.table(kind, BOM + content, source="id", target="en").train[0].where == folder.name("s:2")


def test_csv_quotes(folder):
    content = b'"x, y","say ""hi"""\r\n"two\nlines","\r\n"\r\n"three\n\nlines",d\r\ne,f\r\n'
    splits = folder.table("csv", content)
    assert pairs(splits) == [("x, y", 'say "hi"'), ("three\n\nlines", "d"), ("e", "f")]
    assert [example.where for example in splits.train] == [folder.name(f"s:{line}") for line in (1, 5, 8)]
    assert splits.ledgers["train"].dropped == {"empty": [folder.name("s:2")]}


def test_tsv_knows_no_quotes(folder):
    assert pairs(folder.table("tsv", b'"a\tb"\n')) == [('"a', 'b"')]


def test_a_carriage_return_inside_a_line_of_tsv_is_in_the_ledger(folder):
    """What follows it may be another row, of a file that was put together from two systems."""
    splits = folder.table("tsv", b"a\tb\rc\td\ne\tf\r\ng\r\th\n")
    assert pairs(splits) == [("e", "f")]
    assert splits.ledgers["train"].dropped == {
        "carriage return inside the line": [folder.name("s:1"), folder.name("s:3")]
    }


@pytest.mark.parametrize("kind", ["tsv", "parallel", "jsonl"])
def test_lines_that_end_in_a_carriage_return_are_refused(folder, kind):
    content = b"a\tb\rc\td\r"
    read = {"parallel": folder.parallel, "jsonl": folder.jsonl}.get(kind, folder.table)
    arguments = {"parallel": (content, b"a dog\n"), "jsonl": (content,)}.get(kind, (kind, content))
    wanted = r"expected LF or CRLF. Convert it: tr '\r' '\n' < OLD > NEW."
    assert refusal(read, *arguments) == f"{folder.name('s')} has lines that end in CR alone, {wanted}"


def test_jsonl_fields(folder):
    line = json.dumps({"de": "Öl\n", "en": "oil", "id": 3}) + "\n"
    assert pairs(folder.jsonl(line.encode(), source="de", target="en")) == [("Öl\n", "oil")]


# --- what is dropped -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_blank_and_undecodable_lines_are_dropped_by_name(folder, kind):
    rows = [(b"a", b"b"), (b"", b""), (b"c", b"\xff"), (b"  ", b"d"), (b"\xc3(", b"e"), (b"f", b"g")]
    splits = folder.rows(kind, rows)
    assert pairs(splits) == [("a", "b"), ("f", "g")]
    ledger = splits.ledgers["train"]
    assert (ledger.read, ledger.kept, ledger.cut) == (6, 2, 0)
    other = "t:3" if kind == "parallel" else "s:3"
    assert ledger.dropped == {
        "empty": [folder.name("s:2"), folder.name("s:4")],
        "undecodable": [folder.name(other), folder.name("s:5")],
    }


@pytest.mark.parametrize(("kind", "mark"), [("tsv", b"\t"), ("csv", b",")])
def test_a_row_that_goes_on_behind_the_first_ones_columns_is_dropped_by_name(folder, kind, mark):
    content = b"\na;b\n\xff;x;y\nc;d;e\nf;g; \nh;i;;j\n".replace(b";", mark)
    splits = folder.table(kind, content)
    assert pairs(splits) == [("a", "b"), ("f", "g")]  # of the last, nothing is lost
    assert splits.ledgers["train"].dropped == {
        "empty": [folder.name("s:1")],
        "undecodable": [folder.name("s:3")],
        "more columns than the first row": [folder.name("s:4"), folder.name("s:6")],
    }
    named = folder.table(kind, content[1:].replace(b"\xff", b"w"), source="b", target="a")
    assert pairs(named) == [("g", "f")]
    assert named.ledgers["train"].read == 4
    assert pairs(folder.table(kind, b"a;b;c\nd;e;f\n".replace(b";", mark))) == [("a", "b"), ("d", "e")]


def test_half_a_character_in_json_is_dropped_by_name(folder):
    lines = [r'{"source": "a", "target": "x\ud800"}', r'{"source": "\udc00", "target": "b"}']
    whole = r'{"source": "\ud83d\ude00", "target": "c"}'
    splits = folder.jsonl("\n".join([*lines, whole]).encode())
    assert pairs(splits) == [("😀", "c")]
    assert splits.ledgers["train"].dropped == {"not valid Unicode": [folder.name("s:1"), folder.name("s:2")]}


@pytest.mark.parametrize("kind", FORMATS)
def test_blank_line_at_the_end_is_no_example(folder, kind):
    assert folder.rows(kind, [(b"a", b"b"), (b"", b"")]).ledgers["train"] == Ledger(read=1, kept=1)


@pytest.mark.parametrize("kind", FORMATS)
def test_blank_line_at_the_end_keeps_what_is_before(folder, kind):
    assert pairs(folder.rows(kind, [(b"a", b"b"), (b"", b"")])) == [("a", "b")]


cells = st.sampled_from([b"", b" ", b"a", b"b c", b"\xff", "한".encode()])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FORMATS), st.lists(st.tuples(cells, cells), max_size=9))
def test_what_is_read_is_kept_or_dropped(folder, kind, rows):
    rows = [(b"first", b"line"), *rows]
    splits = folder.rows(kind, rows)
    ledger = splits.ledgers["train"]
    assert ledger.kept == len(splits.train)
    assert ledger.read == ledger.kept + sum(map(len, ledger.dropped.values()))
    whole = [row for row in rows if all(cell.strip() for cell in row) and b"\xff" not in row]
    assert pairs(splits) == [(source.decode(), target.decode()) for source, target in whole]


def test_ledger_for_people_and_machines():
    ledger = Ledger(read=1009, kept=1002, cut=3, dropped={"empty": [f"f:{n}" for n in range(6)], "too long": ["g:7"]})
    assert ledger.lines() == [
        "read 1,009, kept 1,002, dropped 7, cut to length 3",
        "  empty: 6 (f:0, f:1, f:2, f:3, f:4 and 1 more)",
        "  too long: 1 (g:7)",
    ]
    assert ledger.tree() == {"read": 1009, "kept": 1002, "cut": 3, "dropped": ledger.dropped}


# --- what is refused -------------------------------------------------------------------------------------------------


def test_unequal_files_are_refused(folder):
    assert refusal(folder.parallel, b"a\n" * 1001, b"b\n" * 1000) == (
        f"{folder.name('s')} has 1,001 lines but {folder.name('t')} has 1,000: "
        "line n of one must belong to line n of the other. Nothing was read."
    )


def test_file_without_partner_is_refused(folder):
    sides = Sides(source=(folder.write("s", b"a"), folder.name("s")), target=(folder.name("s"),))
    assert refusal(read_files, ParallelData(kind="parallel", train=sides)) == (
        "2 source files but 1 target files: every file needs its partner."
    )


def test_missing_file_says_how_to_obtain(folder):
    path = folder.name("none")
    sides = Sides(source=(path,), target=(path,))
    for missing in (
        ParallelData(kind="parallel", train=sides, obtain=HINT),
        TableData(kind="csv", train=(path,), obtain=HINT),
        JsonData(kind="jsonl", train=(path,), obtain=HINT),
    ):
        assert refusal(read_files, missing) == f"{path} does not exist. {HINT}"
    assert refusal(read_files, TableData(kind="tsv", train=(path,))) == f"{path} does not exist."


def test_directory_is_no_file(folder):
    path = str(folder.path)
    assert refusal(read_files, JsonData(kind="jsonl", train=(path,))) == f"{path} is a directory, expected a file."


def test_path_through_a_file_is_refused(folder):
    path = folder.write("s", b"a") + "/x"
    assert refusal(read_files, JsonData(kind="jsonl", train=(path,))) == f"{path} cannot be read: Not a directory."


@pytest.mark.parametrize("content", [b"", b"\n \r\n", gzip.compress(b"", mtime=0)])
def test_empty_file_is_refused(folder, content):
    assert refusal(folder.table, "tsv", content, obtain=HINT) == f"{folder.name('s')} is empty. {HINT}"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_utf_16_is_refused(folder, kind, encoding, pack):
    content = pack("\ufeffein Hund\n".encode(encoding))
    read = {"parallel": folder.parallel, "jsonl": folder.jsonl}.get(kind, folder.table)
    arguments = {"parallel": (content, b"a dog\n"), "jsonl": (content,)}.get(kind, (kind, content))
    assert refusal(read, *arguments) == (
        f"{folder.name('s')} is UTF-16, expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW."
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_file_without_a_whole_example_is_refused(folder, kind):
    assert refusal(folder.rows, kind, [(b"\xff", b"a")]) == (
        f"the training data holds no example. read 1, kept 0, dropped 1;   undecodable: 1 ({folder.name('s:1')})"
    )


packed = gzip.compress(b"ein Hund\n" * 99, mtime=0)


@pytest.mark.parametrize(
    "content",
    [
        packed[:-9],
        packed[:2],
        packed[:-8] + bytes(8),
        packed + b"more",
        packed[:10] + b"\xff" + packed[11:],
    ],
    ids=["truncated", "begun", "checksum", "longer", "deflate"],
)
def test_damaged_gzip_is_refused(folder, content):
    message = refusal(folder.jsonl, content, obtain=HINT)
    assert message.startswith(f"{folder.name('s')} is damaged gzip data: ")
    assert message.endswith(f" Fetch it again. {HINT}")


@pytest.mark.parametrize(
    ("kind", "content", "line"), [("tsv", b"a\tb\nc\nd\te\n", 2), ("csv", b'"a\n",b\nc\nd,e\n', 3)]
)
def test_a_row_with_too_few_columns_goes_into_the_ledger(folder, kind, content, line):
    splits = folder.table(kind, content)
    assert [target for _, target in pairs(splits)] == ["b", "e"]
    assert splits.ledgers["train"].dropped == {"too few columns": [folder.name(f"s:{line}")]}


@pytest.mark.parametrize(
    ("kind", "content", "columns", "advice"),
    [
        ("tsv", b"a,b\n", "1 column", 'It holds a comma: data.kind = "csv".'),
        ("csv", b"a\tb\n", "1 column", 'It holds a tab: data.kind = "tsv".'),
        ("csv", b"a, b;c\n", "2 columns", "It holds a semicolon: save the file with commas (csv) or tabs (tsv)"),
        ("tsv", b"a\tb\n", "2 columns", "data.source and data.target say which columns are read."),
    ],
)
def test_a_file_with_too_few_columns_is_refused(folder, kind, content, columns, advice):
    message = refusal(folder.table, kind, content, target=2)
    assert message.startswith(f"{folder.name('s:1')} has {columns}, expected at least 3 ({kind}). {advice}")


@pytest.mark.parametrize("kind", FORMATS)
def test_another_encoding_is_named(folder, kind):
    rows = [("한국어".encode("cp949"), b"a")] * 11 + [(b"b", b"c")] * 9
    message = refusal(folder.rows, kind, rows)
    assert message.startswith(f"{folder.name('s')} is not UTF-8 in 11 of 20 lines. Convert it")
    assert pairs(folder.rows(kind, rows[2:])) == [("b", "c")] * 9  # half of it can be read


@pytest.mark.parametrize("kind", ["tsv", "csv"])
def test_missing_column_is_refused(folder, kind):
    content = b"de\ten\na\tb\n" if kind == "tsv" else b"de,en\na,b\n"
    assert refusal(folder.table, kind, content, source="ko", target="en") == (
        f"{folder.name('s:1')} has no column 'ko'. Its header is de, en."
    )
    assert refusal(folder.table, kind, b"\xff" + content, source="ko", target="en") == (
        f"{folder.name('s:1')} has no column 'ko'. Its header is undecodable."
    )


def test_negative_column_is_refused(folder):
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        folder.table("tsv", b"a\tb\n", source=-3)


def test_open_quote_is_refused(folder):
    refusal(folder.table, "csv", b'a,b\nc,"d\ne,f\ng,h\n')


def test_huge_csv_cell_is_read(folder):
    found = folder.table("csv", b'a,b\nc,"' + b"x" * 140_000 + b'"\n').train
    assert found[1].target == "x" * 140_000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1, 2]", "is JSON but no object: expected {...} with one field a side."),
        (b'"text"', "is JSON but no object: expected {...} with one field a side."),
        (b'{"source": "a"}', "has no text in field 'target'. Its fields are source."),
        (b'{"source": "a", "target": 3}', "has 3 in field 'target', expected a text in quotes."),
        (
            b'{"source": "a", "target": ["b", "c"]}',
            """has ["b", "c"] in field 'target', expected a text in quotes. """
            "Several labels are one text, with text.target.separator between them.",
        ),
        (b'{"source": null, "target": "b"}', "has no text in field 'source'. Its fields are source, target."),
        (b"{}", "has no text in field 'source'. Its fields are none."),
        (
            b'{"source": "a", "target": "b", "source": "c"}',
            "has the field 'source' twice in one object. Remove one of them.",
        ),
        (
            b'{"source": "a", "target": "b", "more": {"x": 1, "x": 1}}',
            "has the field 'x' twice in one object. Remove one of them.",
        ),
    ],
)
def test_json_without_text_is_refused(folder, line, message):
    content = b'{"source": "a", "target": "b"}\n' + line
    assert refusal(folder.jsonl, content) == f"{folder.name('s:2')} {message}"


@pytest.mark.parametrize("line", [b"{", b"text", b"[" * 100_000, b"9" * 5000])
def test_line_that_is_not_json_is_refused(folder, line):
    content = b'{"source": "a", "target": "b"}\n' + line
    assert refusal(folder.jsonl, content).startswith(f"{folder.name('s:2')} is not JSON: ")


# --- cutting ---------------------------------------------------------------------------------------------------------


def examples(sources) -> list[Example]:
    return [Example(str(source), f"target {place}", f"f:{place}") for place, source in enumerate(sources)]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(1, 12), st.randoms(use_true_random=False))
def test_cut_is_by_source_whatever_the_order(sources, count, rng):
    given = examples(sources)
    if len(set(sources)) <= count:
        message = f"data.cut_valid = {count} is too much: the training data has {len(set(sources))} different sources"
        assert refusal(cut, given, count, "valid").startswith(message)
        return
    rest, taken = cut(given, count, "valid")
    assert sorted(rest + taken) == sorted(given)
    assert len({example.source for example in taken}) == count
    assert not {example.source for example in taken} & {example.source for example in rest}
    assert rest == [example for example in given if example in rest]  # the order stays
    shuffled = rng.sample(given, len(given))
    assert {example.source for example in cut(shuffled, count, "valid")[1]} == {example.source for example in taken}


def test_cut_of_two_names_differs():
    given = examples(range(100))
    assert cut(given, 50, "valid")[1] != cut(given, 50, "test")[1]


def test_missing_splits_are_cut_from_training(folder):
    sources = random.Random(5).choices(range(30), k=97)
    lines = "".join(f"{source}\t{place}\n" for place, source in enumerate(sources))
    splits = folder.table("tsv", lines.encode() + b"\t\n", cut_valid=3, cut_test=7)
    seen = [{example.source for example in part} for part in splits[:3]]
    assert [len(part) for part in seen[1:]] == [3, 7]
    assert len(set.union(*seen)) == sum(map(len, seen))
    assert sum(map(len, splits[:3])) == 97
    for name, ledger in splits.ledgers.items():
        assert ledger.kept == len(getattr(splits, name))
        assert ledger.read == ledger.kept + sum(map(len, ledger.dropped.values()))


def test_given_splits_are_not_cut(folder):
    valid = folder.write("v", b"e\tf\n")
    splits = folder.table("tsv", b"a\tb\nc\td\n", valid=(valid,), cut_valid=1)
    assert [len(part) for part in splits[:3]] == [2, 1, 0]
    assert splits.valid == [Example("e", "f", f"{valid}:1")]


def test_ledger_of_a_given_split_adds_up(folder):
    valid = folder.write("v", b"\xff\n\xff\n")
    ledger = folder.table("tsv", b"a\tb\nc\td\n", valid=(valid,), cut_valid=1).ledgers["valid"]
    assert ledger.read == ledger.kept + sum(map(len, ledger.dropped.values()))


def test_cutting_too_much_is_refused(folder):
    assert refusal(folder.table, "tsv", b"a\tb\nc\td\n", cut_valid=1, cut_test=1) == (
        "data.cut_test = 1 is too much: the training data has 1 different sources in all. Lower it, or give files of "
        "their own in data.test."
    )


# --- the tables ------------------------------------------------------------------------------------------------------


def test_every_kind_of_data_has_its_reader():
    groups = typing.get_args(typing.get_args(Data)[0])
    kinds = {group: typing.get_args(group.model_fields["kind"].annotation) for group in groups}
    files = {kind for group, some in kinds.items() if issubclass(group, FileData) for kind in some}
    made = {kind for group, some in kinds.items() if issubclass(group, GeneratedData) for kind in some}
    assert files == set(formats.FORMATS)
    assert made == set(synthetic.GENERATORS)
    assert not files & made


@pytest.mark.parametrize("only", ["valid", "test"])
def test_where_one_split_is_wanted_no_other_file_is_read(folder, only):
    there = folder.write("v", b"e\tf\n")
    missing = {"valid": (folder.name("none"),), "test": (folder.name("none"),)}
    sizes = {"cut_valid": 2, "cut_test": 2}
    data = TableData(kind="tsv", train=(folder.name("none"),), **(sizes | missing | {only: (there,)}))
    found = read_splits(data, 1, lambda example: example, only)
    assert getattr(found, only) == [Example("e", "f", f"{there}:1")]
    assert sum(map(len, found[:3])) == 1
    alone = data.model_copy(update=dict.fromkeys({"valid", "test"} - {only}, ()))
    assert read_splits(alone, 1, lambda example: example, only) == found  # nor is the other cut from anything
    train = folder.write("t", b"a\tb\nc\td\n")
    cut_off = TableData(kind="tsv", train=(train,), cut_valid=1, cut_test=0 if only == "valid" else 1, test=(there,))
    assert len(read_splits(cut_off, 1, lambda example: example, "valid").valid) == 1  # it has no files of its own


def test_what_a_task_makes_of_an_example_is_what_is_read(folder):
    """It may have another form, or be dropped; what is not even an example is not offered."""
    offered = []

    def accept(example: Example) -> Example | Dropped:
        offered.append(example.source)
        return Dropped("odd", example.where) if example.source == "b" else example._replace(source=example.source * 2)

    path = folder.write("s", b"a\t1\nb\t2\n\xff\t3\nd\t4\n")
    found = read_splits(TableData(kind="tsv", train=(path,)), 1, accept)
    assert pairs(found) == [("aa", "1"), ("dd", "4")]
    assert offered == ["a", "b", "d"]
    dropped = {"odd": [f"{path}:2"], "undecodable": [f"{path}:3"]}
    assert found.ledgers["train"] == Ledger(read=4, kept=2, dropped=dropped)


@given(
    st.lists(st.tuples(st.text("a가\U0001f600", min_size=1, max_size=6), st.sampled_from("xyz"))), st.integers(1, 40)
)
def test_joined_texts_hold_every_text_once_in_its_order(pairs, most):
    examples = [Example(source, target, f"f:{number}") for number, (source, target) in enumerate(pairs, 1)]
    joined = join_sources(examples, most)
    for label in "xyz":
        own = [example for example in joined if example.target == label]
        lines = [line for example in own for line in example.source.split("\n")]
        assert lines == [source for source, target in pairs if target == label]
        for one, after in itertools.pairwise(own):
            size = len(one.source.encode())
            assert size <= most or "\n" not in one.source
            assert size + 1 + len(after.source.split("\n")[0].encode()) > most  # the next one had no place
    assert {example.where for example in joined} <= {example.where for example in examples}


def test_splits_are_cut_before_texts_are_joined(folder):
    rows = "".join(f"{n % 2} text {n}\n" for n in range(60))
    settings = {"kind": "labelled", "train": (folder.write("s", rows.encode()),), "cut_valid": 9, "join_bytes": 30}
    splits = read_files(LabelledData(**settings))
    texts = [[line for one in split for line in one.source.split("\n")] for split in splits[:2]]
    assert [len(part) for part in texts] == [51, 9]
    assert not {*texts[0]} & {*texts[1]}
    assert all(len({int(line.split()[1]) % 2 for line in one.source.split("\n")}) == 1 for one in splits.train)
