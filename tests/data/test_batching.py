"""Examples -> tensors: every row once, within the budget, with little padding."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.config.run import Config, TrainConfig
from regard.config.text import TextConfig, Tokenization
from regard.data.batching import Row, collate, iterate_updates, pad_sources, padding_share, plan_epoch
from regard.data.examples import Example, Ledger
from regard.data.vocabulary import BOS, EOS, PAD, Vocabularies, Vocabulary
from regard.errors import DataError
from regard.tasks import make_task

LETTERS = Vocabulary.learn(["abcdefg"], Tokenization(kind="char"))
EXAMPLES = [
    Example("ab", "cde", "f:1"),
    Example("abcd", "e", "f:2"),  # a source that is too long
    Example("a", "bcdefg", "f:3"),  # a target that is too long
    Example("abc", "bcd", "f:4"),  # as long as may be
]


def ids(text: str) -> list[int]:
    return LETTERS.encode(text).ids


def encode(examples, text: TextConfig, ledger: Ledger, target: Vocabulary = LETTERS) -> list[Row]:
    """Examples as a translation's rows."""
    config = Config.model_validate({"data": {"kind": "reverse"}, "model": {"kind": "rnn"}, "text": text})
    return make_task(config, Vocabularies(LETTERS, target)).encode_examples(examples, ledger)


def of_lengths(lengths) -> list[Row]:
    """Rows of given numbers of tokens; a source counts its <eos>."""
    return [Row([*[7] * (source - 1), EOS], [8] * target) for source, target in lengths]


# --- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longer", "texts", "ledger"),
    [
        ("drop", ["ab cde", "abc bcd"], Ledger(read=4, kept=2, dropped={"too long": ["f:2", "f:3"]})),
        ("cut", ["ab cde", "abc e", "a bcd", "abc bcd"], Ledger(read=4, kept=4, cut=2)),
    ],
)
def test_what_is_too_long_is_dropped_or_cut_and_counted(longer, texts, ledger):
    found = Ledger(read=4, kept=4)
    rows = encode(EXAMPLES, TextConfig(max_length=3, longer=longer), found)
    assert rows == [Row([*ids(source), EOS], ids(target)) for source, target in map(str.split, texts)]
    assert found == ledger


def test_what_is_too_long_is_refused_by_name():
    with pytest.raises(DataError) as caught:
        encode(EXAMPLES, TextConfig(max_length=3, longer="error"), Ledger())
    assert str(caught.value) == "f:2 has 4 tokens, at most 3 fit (text.max_length). Set text.longer to drop or cut."


def test_each_side_has_its_vocabulary():
    other = Vocabulary.learn(["gfedcba"] * 2 + ["gg"], Tokenization(kind="char"))
    (row,) = encode([Example("gab", "gab", "f:1")], TextConfig(), Ledger(), other)
    assert row == Row([*ids("gab"), EOS], other.encode("gab").ids)
    assert row.source[:-1] != row.target


# --- batches ---------------------------------------------------------------------------------------------------------


def test_collate_by_hand():
    batch = collate([Row([5, 6, EOS], [7]), Row([5, EOS], [7, 8, 9])])
    assert batch.source.tolist() == [[5, 6, EOS], [5, EOS, PAD]]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.target.tolist() == [[BOS, 7, PAD, PAD], [BOS, 7, 8, 9]]
    assert batch.answer.tolist() == [[7, EOS, PAD, PAD], [7, 8, 9, EOS]]
    assert batch.tokens == 6
    assert {tensor.dtype for tensor in batch[:4]} == {torch.int64}
    assert batch.rewards is None


def test_a_text_without_labels_counts_as_one():
    batch = collate([Row([5, EOS], [7, 8], False), Row([5, EOS], [PAD], False)])
    assert batch.answer.tolist() == [[7, 8], [PAD, PAD]]
    assert batch.tokens == 3


def test_sources_alone_are_those_of_the_batch():
    rows = of_lengths([(3, 1), (5, 2)])
    source, lengths = pad_sources([row.source for row in rows])
    assert torch.equal(source, collate(rows).source)
    assert torch.equal(lengths, collate(rows).lengths)


def size(row: Row) -> int:
    """The longer side, with what marks its end or beginning."""
    return max(len(row.source), len(row.target) + 1)


lengths = st.lists(st.tuples(st.integers(1, 19), st.integers(0, 19)), max_size=60)


@settings(deadline=None, max_examples=100)
@given(lengths, st.integers(1, 61), st.integers(-3, 10**6), st.integers(0, 10**4))
def test_epoch_holds_every_row_once_within_the_budget(lengths, budget, seed, number):
    rows = of_lengths(lengths)
    batches = plan_epoch(rows, budget, seed, number)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    assert all(len(batch) == 1 or len(batch) * max(size(rows[i]) for i in batch) <= budget for batch in batches)
    assert all(batches)
    assert batches == plan_epoch(rows, budget, seed, number)


def test_long_row_does_not_thin_the_batches_after_it():
    rows = of_lengths([(50, 1), *[(2, 2)] * 10])
    assert sorted(map(len, plan_epoch(rows, 60, 1, 0))) == [1, 10]


def test_epochs_and_seeds_differ():
    rows = of_lengths((1 + n % 7, n % 5) for n in range(200))
    orders = [plan_epoch(rows, 61, seed, number) for seed, number in ((1, 0), (1, 1), (2, 0), (2, 1))]
    assert all(left != right for left in orders for right in orders if left is not right)
    together = [{frozenset(batch) for batch in order} for order in orders[:2]]
    assert together[0] != together[1]  # not only the order of the batches


def test_neighbours_are_alike_on_both_sides():
    """Sources grow under targets of one length and shrink under the next, so long ones meet."""
    lengths = [(1, 1), (1, 1), (9, 1), (9, 2), (1, 2), (1, 2)]
    batches = plan_epoch(of_lengths(lengths), 18, 1, 0)
    assert sorted(sorted(lengths[i] for i in batch) for batch in batches) == [
        [(1, 1), (1, 1)],
        [(1, 2), (1, 2)],
        [(9, 1), (9, 2)],
    ]


def test_batches_come_in_no_order_of_length():
    rows = of_lengths((n, n) for n in range(1, 60))
    longest = [max(size(rows[i]) for i in batch) for batch in plan_epoch(rows, 100, 1, 0)]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_padding_share_by_hand():
    rows = of_lengths([(3, 1), (2, 3), (4, 4)])  # with <bos>, the targets have 2, 4 and 5 tokens
    assert padding_share(rows, [[0], [1], [2]]) == 0
    assert padding_share(rows, [[0, 1], [2]]) == pytest.approx(1 - (5 + 6 + 4 + 5) / (6 + 8 + 4 + 5))
    assert padding_share(rows, [[0, 1, 2]]) == pytest.approx(1 - (9 + 11) / (12 + 15))


@settings(deadline=None, max_examples=50)
@given(lengths.filter(bool), st.integers(1, 61))
def test_padding_share_counts_the_padding_of_the_tensors(lengths, budget):
    rows = of_lengths(lengths)
    batches = plan_epoch(rows, budget, 1, 0)
    tensors = [tensor for batch in batches for tensor in collate([rows[i] for i in batch])[0:4:3]]
    cells, pads = sum(t.numel() for t in tensors), sum(int((t == PAD).sum()) for t in tensors)
    assert padding_share(rows, batches) == pytest.approx(pads / cells)


def test_captions_have_little_padding():
    """Lengths as of Multi30k in subwords: 29,000 sources of 16 tokens, give or take 5, and targets within about 3."""
    rng = random.Random(7)
    sources = [min(52, max(5, round(rng.lognormvariate(2.72, 0.31)))) for _ in range(29_000)]
    rows = of_lengths((source, max(4, round(rng.gauss(source, 3)))) for source in sources)
    assert padding_share(rows, plan_epoch(rows, 2048, 1, 0)) <= 0.05


def test_batches_start_anywhere():
    rows = [Row([4] * (i % 5 + 1), [5] * (i % 3 + 1)) for i in range(40)]
    config = TrainConfig(batch_tokens=12, accumulate=3)
    stream = iterate_updates(rows, config, 0)
    first = [next(stream) for _ in range(30)]
    assert len(plan_epoch(rows, 12, 1, 0)) < 3 * 30  # several epochs
    for start in (0, 1, 7, 19):
        later = next(iterate_updates(rows, config, start))
        for left, right in zip(first[start], later, strict=True):
            assert torch.equal(left.source, right.source)
