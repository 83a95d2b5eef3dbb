"""Embeddings from files of vectors and from counted text."""

import gzip
import random

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from regard.errors import DataError
from regard.nn import word_vectors
from regard.nn.layers import make_embedding
from regard.nn.word_vectors import compute_ppmi, count_neighbours, count_vectors, load_vectors

# --- files of vectors ------------------------------------------------------------------------------------------------

WORDS = {"a": 2, "new york": 0, "4": 1}
ROWS = [[3.0, 4.5], [5.0, -6.0], [1.0, 2e-3]]
LINES = ["a 1 2e-3", "unheard 7 8", "new york 3 4.5", "4 5 -6"]


def loaded(folder, text, size=2):
    """How many rows were filled from a file with this text, and the table of three."""
    path, table = folder / "vectors.txt", make_embedding(3, size)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_vectors(table, str(path), WORDS.get), table


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(LINES),  # GloVe
        "4 2\n" + "\n".join(LINES) + "\n",  # word2vec
        "4 2\n" + " \n".join(LINES) + " \n",  # fastText
        "\r\n".join(LINES) + "\r\n",
        gzip.compress("\n".join(LINES).encode(), mtime=0),
    ],
    ids=["glove", "word2vec", "fasttext", "windows", "gzip"],
)
def test_vectors_load_in_every_form(tmp_path, text):
    filled, table = loaded(tmp_path, text)
    assert filled == 3
    assert_close(table.weight.detach(), torch.tensor(ROWS))


def test_a_word_without_a_vector_keeps_its_row(tmp_path):
    torch.manual_seed(7)
    before = make_embedding(3, 2).weight[:2]
    torch.manual_seed(7)
    filled, table = loaded(tmp_path, LINES[0])
    assert filled == 1
    assert torch.equal(table.weight[:2], before)


WIDTH = r"vectors\.txt holds vectors of {} numbers, but the embedding is 2 wide\. Set the model's embedding size to"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1", WIDTH.format(1)),
        ("a 1 2 3\n4 4 5 6", WIDTH.format(3)),
        ("2 3\na 1 2 3\n4 4 5 6", WIDTH.format(3)),
        ("a 1 2\n7 3", r"vectors\.txt:2 is not a word and 2 finite numbers\."),
        ("a 1 2\n4 3 nan", r"vectors\.txt:2 is not a word and 2 finite numbers\."),
        ("b 1 2", r"no word of .*vectors\.txt is in the vocabulary: nothing was loaded\. Is it the same language and"),
        ("a 1 2\n4 1 x", r"vectors\.txt:2 is not a word and 2 numbers: could not convert string to float: 'x'\."),
        ("", r"vectors\.txt is empty\."),
        ("5 ²", WIDTH.format(1)),
        (b"\xef\xbb\xbf\n", WIDTH.format(-1)),
    ],
)
def test_a_file_that_cannot_serve_is_explained(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        loaded(tmp_path, text)


def test_the_first_spelling_of_a_word_counts(tmp_path):
    """Files have the frequent one first; another that is the same word to the vocabulary changes nothing."""
    (tmp_path / "vectors.txt").write_text("the 1 2\nThe 3 4\nTHE 5 6\n", encoding="utf-8")
    table = make_embedding(3, 2)
    assert load_vectors(table, str(tmp_path / "vectors.txt"), {"the": 1, "The": 1, "THE": 1}.get) == 1
    assert table.weight[1].tolist() == [1.0, 2.0]


def test_a_file_that_does_not_exist_is_explained(tmp_path):
    with pytest.raises(DataError, match=r"vectors\.txt does not exist\."):
        load_vectors(make_embedding(3, 2), str(tmp_path / "vectors.txt"), WORDS.get)


@pytest.mark.parametrize("word", ["\x85", "\u2028", "x\x1cy"])
def test_a_line_ends_where_the_file_says_so(tmp_path, word):
    assert loaded(tmp_path, "\n".join([f"{word} 7 8", *LINES]))[0] == 3


# --- counted text ----------------------------------------------------------------------------------------------------


def counted(texts, entries):
    """`neighbours` by the definition."""
    table = torch.zeros(entries, 2 * entries)
    for text in texts:
        for i, one in enumerate(text):
            for j, other in enumerate(text):
                if 0 < abs(i - j) <= word_vectors.WINDOW:
                    table[one, other + (entries if j < i else 0)] += 1 / abs(i - j)
    return table


@pytest.mark.parametrize("piece", [7, 2**21])
def test_neighbours_are_counted_by_distance_and_side(monkeypatch, piece):
    """In pieces too: pairs that stand across two of them are lost, which a piece that ends with a text has none of."""
    monkeypatch.setattr(word_vectors, "PIECE", piece)
    texts = [[4, 5, 6, 4, 5], [], [6], [5, 5]] if piece > 7 else [[4, 5, 6, 4, 5], [4, 4, 6, 6, 5], [6, 5, 6, 5, 6]]
    assert_close(count_neighbours(texts, 7).to_dense(), counted(texts, 7))


def test_information_is_by_how_much_a_neighbour_is_likelier_than_by_chance():
    counts = torch.tensor([[4.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    found = compute_ppmi(counts.to_sparse(), power=1.0).to_dense()
    joint = counts / counts.sum()
    wanted = (joint / joint.sum(1, keepdim=True) / joint.sum(0)).log().clamp(min=0).nan_to_num(0.0)
    assert_close(found, wanted)


def test_rows_are_those_of_the_exact_decomposition():
    """A table as wide as the matrix has directions keeps all there is to know: the cosines of the exact one."""
    chance = random.Random(3)
    texts = [[chance.randrange(4, 12) for _ in range(9)] for _ in range(30)]
    table = make_embedding(12, 12)
    before = table.weight[:4].clone()
    assert count_vectors(table, texts) == 8
    assert torch.equal(table.weight[:4], before)  # ids without neighbours keep their rows
    left, values, _ = torch.linalg.svd(compute_ppmi(count_neighbours(texts, 12)).to_dense())
    exact = F.normalize((left * values.sqrt())[4:], dim=1)
    rows = table.weight[4:].detach()
    assert_close(rows @ rows.T, exact @ exact.T, rtol=0, atol=1e-4)


def test_words_of_a_kind_are_alike():
    """Animals and verbs, each at random among its own: whatever the word, the nearest is of its kind."""
    chance = random.Random(5)
    animals, verbs, the = range(4, 12), range(12, 20), 20
    texts = [[the, chance.choice(animals), chance.choice(verbs), the, chance.choice(animals)] for _ in range(400)]
    table = make_embedding(21, 4)
    state = torch.get_rng_state()
    assert count_vectors(table, texts) == 17
    assert torch.equal(torch.get_rng_state(), state)  # what is drawn later does not depend on it
    rows = F.normalize(table.weight[4:20].detach(), dim=1)
    near = (rows @ rows.T).fill_diagonal_(-1).argmax(1)
    assert [int(i) // 8 for i in near] == [0] * 8 + [1] * 8


def test_a_table_that_is_wider_than_the_text_is_rich():
    table = make_embedding(6, 64)
    assert count_vectors(table, [[4, 5, 4]]) == 2
    assert table.weight.isfinite().all()
    assert_close(table.weight[4:].norm(dim=1), torch.ones(2))


def test_nothing_to_count_changes_nothing():
    table = make_embedding(6, 3)
    before = table.weight.clone()
    assert count_vectors(table, [[], [4]]) == 0
    assert torch.equal(table.weight, before)
