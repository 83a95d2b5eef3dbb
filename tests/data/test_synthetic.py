"""Made data: three splits that share nothing, one answer to every source, the same on every machine."""

import datetime
import itertools
import math
import operator
import re
from collections import Counter

import pytest
from num2words import CONVERTER_CLASSES, num2words
from pydantic import ValidationError

from regard.config.data import DatesData, LineupData, ListopsData, NumbersData, ReverseData, TransduceData
from regard.config.run import Config
from regard.data.examples import Dropped, Ledger
from regard.data.splits import read_splits
from regard.data.synthetic import GENERATORS
from regard.errors import ConfigError, DataError
from regard.training.prepare import read_examples

REVERSE = ReverseData(kind="reverse", examples=300, valid=20, test=50)
NUMBERS = NumbersData(kind="numbers", examples=300, valid=50, test=200)
DATES = DatesData(kind="dates", examples=2000, valid=100, test=300)
TRANSDUCE = TransduceData(kind="transduce", examples=300, valid=30, test=100)
LINEUP = LineupData(kind="lineup", examples=100, valid=20, test=50, positions=5)
TASKS = pytest.mark.parametrize(
    "settings", [REVERSE, NUMBERS, DATES, TRANSDUCE, LINEUP], ids=lambda settings: settings.kind
)


def generate(settings, seed):
    """All that is made, accepted as it is."""
    return read_splits(settings, seed, lambda example: example)


def refusal(settings) -> str:
    with pytest.raises(ConfigError) as caught:
        generate(settings, seed=1)
    return str(caught.value)


@TASKS
@pytest.mark.parametrize("seed", [1, 2])
def test_splits_share_no_source(settings, seed):
    splits = generate(settings, seed)
    assert [len(part) for part in splits[:3]] == [settings.examples, settings.valid, settings.test]
    train, valid, test = ({example.source for example in part} for part in splits[:3])
    assert not train & valid | train & test | valid & test
    assert (len(valid), len(test)) == (settings.valid, settings.test)
    for name, ledger in splits.ledgers.items():
        assert ledger.read == ledger.kept == len(getattr(splits, name))
        assert not ledger.dropped
    last = "test depth 6" if settings.kind == "transduce" else "test"
    assert [splits.train[0].where, splits.test[-1].where] == ["train:1", f"{last}:{settings.test}"]


@TASKS
def test_seed_decides_all(settings):
    assert generate(settings, 1) == generate(settings, 1)
    assert generate(settings, 1).train != generate(settings, 2).train


ambiguous = DATES.model_copy(  # all of a few days: 11/12 is one of them in November, and one in December
    update={"languages": ("en", "pt_PT"), "first_year": 2000, "last_year": 2001, "test": 20, "examples": 8000}
)


@pytest.mark.parametrize("settings", [REVERSE, NUMBERS, DATES, ambiguous])
def test_every_source_has_one_answer(settings):
    meanings: dict[str, str] = {}
    for part in generate(settings, 1)[:3]:
        for example in part:
            assert meanings.setdefault(example.source, example.target) == example.target


def test_what_is_made_is_dropped_where_a_task_cannot_take_it():
    made = generate(REVERSE, 1)
    some = read_splits(REVERSE, 1, lambda one: one if len(one.source) > 2 else Dropped("short", one.where))
    for name, ledger in some.ledgers.items():
        before = getattr(made, name)
        assert getattr(some, name) == [example for example in before if len(example.source) > 2]
        short = [example.where for example in before if len(example.source) <= 2]
        assert ledger == Ledger(len(before), len(before) - len(short), dropped={"short": short} if short else {})


@pytest.mark.parametrize(("answer", "text"), [("span", {}), ("word", {"target": {"kind": "label"}})])
def test_made_data_has_no_questions(answer, text):
    config = Config.model_validate({"data": REVERSE, "model": {"kind": "reader", "answer": answer}, "text": text})
    with pytest.raises(
        DataError, match=r"holds no example\. read 300, kept 0, dropped 300;   no context: 300 \(train:1"
    ):
        read_examples(config)


# --- reverse ---------------------------------------------------------------------------------------------------------


def test_reverse_is_backwards():
    settings = ReverseData(kind="reverse", examples=300, valid=11, test=23, shortest=2, longest=5, letters=3)
    splits = generate(settings, 1)
    for part in splits[:3]:
        assert all(example.target == example.source[::-1] for example in part)
        assert {len(example.source) for example in part} <= {2, 3, 4, 5}
        assert set("".join(example.source for example in part)) == set("abc")


def test_reverse_holds_the_same_fifth_out_under_every_seed():
    settings = ReverseData(kind="reverse", examples=1, valid=20, test=20, longest=5, letters=3)
    held = {example.source for seed in range(5) for part in generate(settings, seed)[1:3] for example in part}
    assert len(held) < 0.3 * (3 + 3**2 + 3**3 + 3**4 + 3**5)


def test_reverse_of_too_few_strings_is_refused():
    message = refusal(ReverseData(kind="reverse", examples=5, valid=3, test=4, longest=1, letters=2))
    assert message.startswith("data: there are only ")
    assert "but 7 are wanted. Make data.examples, data.valid or data.test smaller" in message


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["de", "en", "ko"])
def test_numbers_are_those_of_num2words(language):
    splits = generate(NUMBERS.model_copy(update={"language": language}), 1)
    for part in splits[:3]:
        assert all(num2words(int(example.target), lang=language) == example.source for example in part)
        assert all(str(int(example.target)) == example.target for example in part)


def test_numbers_of_every_length_are_tested_and_most_short_ones_seen():
    splits = generate(NUMBERS, 1)
    train, valid, test = (Counter(len(example.target) for example in part) for part in splits[:3])
    assert set(test) == set(train) == {1, 2, 3, 4, 5, 6}
    assert valid[1] + test[1] == 2  # a fifth of 0..9
    assert valid[2] + test[2] == 18  # a fifth of 10..99
    assert train[1] == 8
    assert max(train[length] for length in (3, 4, 5, 6)) - min(train[length] for length in (3, 4, 5, 6)) <= 1


def test_numbers_never_repeat_in_training():
    train = generate(NUMBERS, 1).train
    assert len({example.target for example in train}) == len(train)


def test_unknown_language_is_refused():
    assert refusal(NumbersData(kind="numbers", language="tlh")) == (
        f"data.language is 'tlh', which num2words does not know. It knows {', '.join(CONVERTER_CLASSES)}."
    )


@pytest.mark.parametrize("count", [{"examples": 1000}, {"test": 50}])
def test_more_numbers_than_there_are_is_refused(count):
    refusal(NumbersData(kind="numbers", digits=2, **{"examples": 20, "valid": 2, "test": 3, **count}))


# --- dates -----------------------------------------------------------------------------------------------------------


def test_dates_are_iso_of_the_years_asked_for():
    splits = generate(DATES.model_copy(update={"first_year": 1990, "last_year": 2010}), 1)
    for part in splits[:3]:
        for example in part:
            date = datetime.date.fromisoformat(example.target)
            assert date.isoformat() == example.target
            assert 1990 <= date.year <= 2010
            assert str(date.year) in example.source  # written out, in every language
            assert str(date.day) in example.source


def test_dates_of_every_language_appear():
    sources = [example.source for example in generate(DATES, 1).train]
    for pattern in (r"년 \d+월 \d+일", r"^\d{4}\. \d+\. \d+\.$", "요일", "Sunday", "Sonntag", "dimanche", "domingo"):
        assert any(re.search(pattern, source) for source in sources), pattern


def test_short_forms_that_differ_in_order_alone_are_written_by_one_language():
    settings = DATES.model_copy(update={"languages": ("en", "fr", "es")})
    short = [example for example in generate(settings, 1).train if re.fullmatch(r"\d+/\d+/\d+", example.source)]
    assert short
    for example in short:
        month, day, year = map(int, example.source.split("/"))
        assert datetime.date(year, month, day).isoformat() == example.target


def test_days_of_training_are_not_held_out():
    train, valid, test = ({example.target for example in part} for part in generate(DATES, 1)[:3])
    assert not train & (valid | test)


def test_days_of_validation_are_not_tested():
    _, valid, test = ({example.target for example in part} for part in generate(DatesData(kind="dates"), 1)[:3])
    assert not valid & test


@pytest.mark.parametrize("name", ["xx", "klingon", "en_!!"])
def test_unknown_locale_is_refused(name):
    message = refusal(DATES.model_copy(update={"languages": ("en", name)}))
    assert message.startswith(f"data.languages is en, {name}; babel says: ")


def test_more_dates_than_there_are_is_refused():
    few = {"first_year": 2000, "last_year": 2000, "languages": ("en",), "valid": 100, "test": 150}
    message = refusal(DATES.model_copy(update=few))
    assert "different dates in these languages and years, but 100 are wanted." in message


@pytest.mark.parametrize(
    "wrong", [{"languages": ()}, {"first_year": 2000, "last_year": 1999}, {"first_year": 20_000}, {"last_year": 0}]
)
def test_no_dates_at_all_are_refused(wrong):
    with pytest.raises(ValidationError):
        DatesData(kind="dates", examples=5, valid=2, test=3, **wrong)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def compute_prefix(words):
    """The value of a prefix expression, and how deep its brackets are; the words are taken from the front."""
    word = words.pop(0)
    if word != "(":
        return int(word), 0
    sign, parts = words.pop(0), []
    while words[0] != ")":
        parts.append(compute_prefix(words))
    words.pop(0)
    values = [value for value, _ in parts]
    return (sum(values) if sign == "+" else math.prod(values)), 1 + max(depth for _, depth in parts)


def test_prefix_and_infix_say_the_same():
    splits = generate(TRANSDUCE, 3)
    for part, depths in ((splits.train, {2, 3, 4}), (splits.valid, {2, 3, 4}), (splits.test, {2, 3, 4, 5, 6})):
        found = Counter()
        for example in part:
            words = example.source.split()
            value, depth = compute_prefix(words)
            assert not words
            assert eval(example.target) == value  # our own arithmetic
            found[depth] += 1
            if part is splits.test:
                assert example.where.startswith(f"test depth {depth}:")
        assert set(found) == depths
        assert max(found.values()) - min(found.values()) <= 1


def test_too_many_expressions_are_refused():
    few = TRANSDUCE.model_copy(update={"largest": 1, "operands": 2, "shallowest": 1, "deepest": 1, "test_deepest": 1})
    assert "different expressions of depth 1" in refusal(few)


# --- line-ups --------------------------------------------------------------------------------------------------------


def test_a_line_up_is_the_best_of_every_assignment_and_nobody_chooses_alone():
    for example in generate(LINEUP, 4).test:
        sides = [side.split() for side in example.source.split(" | ")]
        names, places = ([side[at] for at in range(0, len(side), 5)] for side in sides)
        skills, wishes = (
            [[int(number) - 4.5 for number in side[at + 1 : at + 5]] for at in range(0, len(side), 5)] for side in sides
        )
        fits = [
            [sum(map(operator.mul, wish, skill)) / math.hypot(*wish) / math.hypot(*skill) for skill in skills]
            for wish in wishes
        ]
        assert LINEUP.fewest <= len(places) <= LINEUP.positions
        assert 0 <= len(names) - len(places) <= LINEUP.bench

        def total(order, fits=fits):
            return sum(fits[place][player] for place, player in enumerate(order))

        best = max(itertools.permutations(range(len(names)), len(places)), key=total)
        chosen = [names.index(name) for name in example.target.split()]
        assert total(chosen) == pytest.approx(total(best), abs=1e-12)
        favourites = [max(range(len(names)), key=row.__getitem__) for row in fits]
        assert len({*favourites}) < len(places)


def evaluate_list(tokens):
    """What an expression comes to, by a stack."""
    stack = [[]]
    for token in tokens:
        if token.startswith("["):
            stack.append([token[1:]])
        elif token == "]":
            name, *digits = stack.pop()
            middle = sorted(digits)[(len(digits) - 1) // 2 : len(digits) // 2 + 1]
            values = {"MAX": max(digits), "MIN": min(digits), "SM": sum(digits) % 10, "MED": sum(middle) // len(middle)}
            stack[-1].append(values[name])
        else:
            stack[-1].append(int(token))
    ((value,),) = stack
    return value


def test_lists_come_to_their_digit_and_have_the_wanted_lengths():
    sizes = {"examples": 150, "valid": 20, "test": 20}
    settings = ListopsData(kind="listops", **sizes, shortest=20, longest=90, deepest=5, operands=5)
    splits = GENERATORS["listops"](settings, 1)
    assert [len(split) for split in splits] == [150, 20, 20]
    sources = [source.split() for split in splits for source, _ in split]
    assert [str(evaluate_list(source)) for source in sources] == [target for split in splits for _, target in split]
    assert all(20 <= len(source) <= 90 for source in sources)
    assert len(set(map(tuple, sources))) == len(sources)
    depths = [max(itertools.accumulate((t[0] == "[") - (t == "]") for t in source)) for source in sources]
    assert max(depths) == 4  # and the digits are the fifth level
    assert {token for source in sources for token in source} == {"[MAX", "[MIN", "[MED", "[SM", "]", *"0123456789"}
    assert GENERATORS["listops"](settings, 1) == splits != GENERATORS["listops"](settings, 2)


def test_lists_that_cannot_be_are_refused():
    few = ListopsData(kind="listops", examples=10**6, shortest=1, longest=4, operands=2)
    with pytest.raises(ConfigError, match=r"about [0-9,]+ expressions of 1 to 4 tokens, but 1,002,500 are wanted"):
        GENERATORS["listops"](few, 1)
