"""Tagged words in files: columns and CoNLL-U."""

import gzip

import pytest

from regard.config.data import ColumnsData, ConlluData
from regard.data.columns import read_columns, read_conllu
from regard.data.examples import Dropped, Example, Words
from regard.errors import DataError

TREE = """\ufeff# text = 그는 갔다.
1\t그는\t그\tPRON\t_\t_\t2\tnsubj\t_\t_
2-3\t갔다.\t_\t_\t_\t_\t_\t_\t_\t_
2\t갔다\t가\tVERB\t_\t_\t0\troot\t_\t_
3\t.\t.\tPUNCT\t_\t_\t2\tpunct\t_\t_
3.1\t없다\t없\tVERB\t_\t_\t_\t_\t_\t_

1\t응\t응\t_\t_\t_\t0\troot\t_\t_

# a comment
1\t네\t네\tINTJ\t_\t_\t0\troot\t_\t_
"""


@pytest.fixture
def columns(tmp_path):
    def read(text, **settings):
        path = tmp_path / "words.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return list(read_columns(ColumnsData(kind="columns", train=("x",), **settings), str(path)))

    return read


def test_sentences_end_at_blank_lines(columns, tmp_path):
    found = columns("\n\nThe DT B-NP\r\ndog NN I-NP\n \n\n. . O\n", features={"pos": 1})
    assert found == [
        Example(Words(("The", "dog"), (("DT",), ("NN",))), "B-NP I-NP", f"{tmp_path}/words.txt:3"),
        Example(Words((".",), ((".",),)), "O", f"{tmp_path}/words.txt:7"),
    ]


def test_tabs_part_columns_that_have_spaces(columns):
    (found,) = columns("x\tNew York\ty\tB-LOC\n", word=1)
    assert (found.source, found.target) == (Words(("New York",), ((),)), "B-LOC")


def test_columns_count_from_either_end(columns):
    (found,) = columns("0 dog NN B-NP x\n", word=1, tag=-2, features={"pos": -3})
    assert (found.source, found.target) == (Words(("dog",), (("NN",),)), "B-NP")


def test_a_missing_column_is_named_with_its_line(columns, tmp_path):
    with pytest.raises(DataError) as error:
        columns("The DT B-NP\ndog\n", features={"pos": 1})
    told = "words.txt:2 has 1 columns, but data.features.pos is column 1: 'dog'."
    assert str(error.value) == f"{tmp_path}/{told}"
    with pytest.raises(DataError, match=r"words.txt:1 has nothing in column 0, which is data.word: '\\tB-NP'\.$"):
        columns("\tB-NP\n")


def test_a_sentence_with_a_line_that_is_no_text_is_dropped_whole(columns, tmp_path):
    first, second = columns(b"a X\n\xff X\nb X\n\nc X\n")
    assert first == Dropped("undecodable", f"{tmp_path}/words.txt:1")
    assert (second.source, second.where) == (Words(("c",), ((),)), f"{tmp_path}/words.txt:5")


def conllu(path, **settings):
    return list(read_conllu(ConlluData(kind="conllu", train=("x",), **settings), str(path)))


def test_treebanks(tmp_path):
    """Words that stand for several, empty ones and comments are left out; a word without a tag drops its sentence."""
    path = tmp_path / "ko.conllu.gz"
    path.write_bytes(gzip.compress(TREE.replace("\n", "\r\n").encode()))
    first, second, third = conllu(path, features=("lemma",))
    wanted = Words(("그는", "갔다", "."), (("그",), ("가",), (".",)))
    assert first == Example(wanted, "PRON VERB PUNCT", f"{path}:1")
    assert second == Dropped("no upos", f"{path}:8")
    assert (third.source.words, third.target, third.where) == (("네",), "INTJ", f"{path}:10")
    assert conllu(path, tag="deprel")[1].target == "root"


def test_what_is_no_treebank_is_said(tmp_path):
    path = tmp_path / "x.conllu"
    path.write_text("1\tone\t_\tX\t_\t_\t0\troot\t_\t_\n\nThe DT B-NP\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"{path}:3 is not CoNLL-U: "):
        conllu(path)
    path.write_text("# only = comments\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"{path}:1 is not CoNLL-U: a sentence without words\.$"):
        conllu(path)
