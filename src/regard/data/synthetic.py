"""Parallel data that is made, exact and endless: reversed strings, number words, dates, arithmetic, line-ups, lists.

A generator gives three splits that never share a source; it is a pure function of its settings and the seed.
"""

import datetime
import math
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from regard.config.data import DatesData, LineupData, ListopsData, NumbersData, ReverseData, TransduceData
from regard.data.examples import fingerprint
from regard.data.images.digits import generate_digits
from regard.data.images.shapes import generate_shapes
from regard.errors import ConfigError

Pairs = list[tuple[str, ...]]
"""Sources and targets; and, where parts of a split are scored apart, the name of the part."""
Made = tuple[Pairs, Pairs, Pairs]
"""Sources and targets to train on, to validate on and to test on."""


def too_few(there: str, wanted: int) -> ConfigError:
    """The error for more examples than can be made."""
    return ConfigError(
        f"data: there are only {there}, but {wanted:,} are wanted. "
        "Make data.examples, data.valid or data.test smaller, or the task larger."
    )


def generate_reverse(settings: ReverseData, seed: int) -> Made:
    """Letters, and the same letters backwards. A fifth of all strings, by their hash, can be held out, also of the
    short ones; those come once; the others can be trained on."""
    rng, alphabet = random.Random(seed), string.ascii_lowercase[: settings.letters]
    wanted = settings.valid + settings.test
    seen: dict[str, None] = {}  # in the order they came
    train: list[str] = []
    fruitless = 0
    while len(seen) < wanted or len(train) < settings.examples:
        fruitless += 1
        letters = "".join(rng.choices(alphabet, k=rng.randint(settings.shortest, settings.longest)))
        if int(fingerprint(letters), 16) % 5 == 0:
            if len(seen) < wanted and letters not in seen:
                seen[letters] = None
                fruitless = 0
        elif len(train) < settings.examples:
            train.append(letters)
            fruitless = 0
        if fruitless > 2000:
            raise too_few(f"{len(seen):,} sources to hold out (a fifth of all)", wanted)
    held = list(seen)
    random.Random(wanted).shuffle(held)
    pairs: Pairs = [(letters, letters[::-1]) for letters in (*held, *train)]
    return pairs[wanted:], pairs[: settings.valid], pairs[settings.valid : wanted]


def generate_numbers(settings: NumbersData, seed: int) -> Made:
    """Number words -> digits. The lengths one to `digits` come equally often as far as there are that many numbers;
    of no length is more than a fifth held out, so the shortest numbers are mostly seen."""
    rng, words = random.Random(seed), number_words(settings.language)
    wanted = settings.valid + settings.test
    held = draw_stratified(wanted, settings.digits, 0.2, set(), rng)
    train = draw_stratified(settings.examples, settings.digits, 1.0, set(held), rng)
    for name, made, count in (("held-out", held, wanted), ("training", train, settings.examples)):
        if len(made) < count:
            raise too_few(f"{len(made):,} {name} numbers of up to {settings.digits} digits", count)
        rng.shuffle(made)
    pairs: Pairs = [(words(number), str(number)) for number in (*held, *train)]
    return pairs[wanted:], pairs[: settings.valid], pairs[settings.valid : wanted]


def draw_stratified(count: int, digits: int, share: float, taken: set[int], rng: random.Random) -> list[int]:
    """Draw `count` different numbers, the same share of every length; shorter lengths that run out leave their part
    to the longer ones. At most `share` of a length is drawn."""
    chosen: list[int] = []
    for length in range(1, digits + 1):
        every = range(0 if length == 1 else 10 ** (length - 1), 10**length)
        wanted = min((count - len(chosen)) // (digits - length + 1), max(1, int(len(every) * share)))
        drawn = rng.sample(every, min(len(every), wanted + len(taken)))
        chosen += [number for number in drawn if number not in taken][:wanted]
    return chosen


def number_words(language: str) -> Callable[[int], str]:
    """The function from a number to its words in a language of num2words."""
    from num2words import CONVERTER_CLASSES, num2words

    if language not in CONVERTER_CLASSES:
        raise ConfigError(
            f"data.language is {language!r}, which num2words does not know. It knows {', '.join(CONVERTER_CLASSES)}."
        )

    def words(number: int) -> str:
        try:
            return str(num2words(number, lang=language))
        except Exception as error:  # some languages of the library cannot count far, each in its own way
            raise ConfigError(f"data.language {language!r}: num2words cannot say {number}: {error}.") from error

    return words


def date_forms(languages: Sequence[str]) -> list[tuple[Any, str]]:
    """Locales and the patterns in which babel writes a date there, with whole years. Of two languages whose short forms
    differ in order alone (3/4/2020), only the one named first has it."""
    from babel import Locale, UnknownLocaleError

    try:
        locales = [Locale.parse(name.replace("-", "_")) for name in languages]
    except (UnknownLocaleError, ValueError) as error:
        raise ConfigError(f"data.languages is {', '.join(languages)}; babel says: {error}.") from error
    forms = {}
    orders: dict[str, str] = {}
    for locale in locales:
        for name in ("short", "medium", "long", "full"):
            pattern = re.sub("y+", "y", locale.date_formats[name].pattern)
            order = "".join(re.findall("[yMd]", re.sub(r"(.)\1+", r"\1", pattern)))
            separators = re.sub("[yMd ]", "", pattern)
            if orders.setdefault(separators, order) == order or name != "short":
                forms[locale, name] = pattern
    return [(locale, pattern) for (locale, _), pattern in forms.items()]


def generate_dates(settings: DatesData, seed: int) -> Made:
    """Dates as babel writes them in several languages -> ISO 8601. The days, not only their spellings, of the three
    splits differ, and every source has one answer."""
    from babel.dates import format_date

    rng, forms = random.Random(seed), date_forms(settings.languages)
    first = datetime.date(settings.first_year, 1, 1).toordinal()
    last = datetime.date(settings.last_year, 12, 31).toordinal()
    meanings: dict[str, str] = {}

    def take(count: int, rests: range, unique: bool) -> Pairs:
        pairs: Pairs = []
        for _ in range(50 * count):
            while (day := rng.randint(first, last)) % 20 not in rests:
                pass
            locale, pattern = rng.choice(forms)
            date = datetime.date.fromordinal(day)
            source, target = format_date(date, pattern, locale=locale), date.isoformat()
            if (known := meanings.get(source)) is not None and (unique or known != target):
                continue
            meanings[source] = target
            pairs.append((source, target))
            if len(pairs) == count:
                return pairs
        raise too_few(f"{len(pairs):,} different dates in these languages and years", count)

    valid = take(settings.valid, range(1), unique=True)  # every twentieth day
    test = take(settings.test, range(1, 2), unique=True)
    return take(settings.examples, range(2, 20), unique=False), valid, test


Expression = int | tuple["str | Expression", ...]
"""A number, or an operator and what it joins."""


def draw_expression(settings: TransduceData, depth: int, rng: random.Random) -> Expression:
    """Brackets within each other exactly `depth` times."""
    if not depth:
        return rng.randint(0, settings.largest)
    count = rng.randint(2, settings.operands)
    depths = [
        rng.randint(1, depth - 1) if depth > 1 and rng.random() < settings.nested else 0 for _ in range(count - 1)
    ]
    depths.insert(rng.randrange(count), depth - 1)
    return rng.choice("+*"), *(draw_expression(settings, inner, rng) for inner in depths)


def write_prefix(expression: Any) -> str:
    """( + 1 2 )."""
    return f"( {' '.join(map(write_prefix, expression))} )" if isinstance(expression, tuple) else str(expression)


def write_infix(expression: Any, *, outer: bool = True) -> str:
    """1 + 2, in brackets unless it is the outermost."""
    if not isinstance(expression, tuple):
        return str(expression)
    sign, *operands = expression
    joined = f" {sign} ".join(write_infix(one, outer=False) for one in operands)
    return joined if outer else f"( {joined} )"


def generate_transduce(settings: TransduceData, seed: int) -> Made:
    """Prefix expressions -> infix. All depths come equally often, and those of the test are its parts."""
    rng, seen = random.Random(seed), set[str]()

    def take(count: int, deepest: int, part: str = "") -> Pairs:
        pairs: Pairs = []
        depths = range(settings.shallowest, deepest + 1)
        for number in range(count):
            depth = depths[number * len(depths) // count]
            for _ in range(100):
                expression = draw_expression(settings, depth, rng)
                source = write_prefix(expression)
                if source not in seen:
                    break
            else:
                raise too_few(f"about {len(pairs):,} different expressions of depth {depth}", count)
            seen.add(source)
            pairs.append((source, write_infix(expression), *([f"{part} depth {depth}"] if part else [])))
        return pairs

    test, valid = take(settings.test, settings.test_deepest, "test"), take(settings.valid, settings.deepest)
    return take(settings.examples, settings.deepest), valid, test


PLAYERS = [
    *("Kim", "Lee", "Park", "Choi", "Jung", "Kang", "Cho", "Yoon", "Jang", "Lim", "Han", "Oh", "Seo", "Shin", "Kwon"),
    *("Hwang", "Ahn", "Song"),
]
POSITIONS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"]


def cosine(left: Sequence[int], right: Sequence[int]) -> float:
    """Of two lists of numbers from 0 to 9, as they lie around their middle."""
    first, second = ([number - 4.5 for number in side] for side in (left, right))
    return sum(a * b for a, b in zip(first, second, strict=True)) / (math.hypot(*first) * math.hypot(*second))


def draw_lineup(settings: LineupData, rng: random.Random) -> tuple[str, str] | None:
    """One game and its answer; None: every position likes another player best, and nobody has to give way."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    count = rng.randint(settings.fewest, settings.positions)
    names = rng.sample(PLAYERS, count + rng.randint(0, settings.bench))
    sides = [[[rng.randint(0, 9) for _ in range(settings.skills)] for _ in side] for side in (names, range(count))]
    fits = [[cosine(wish, player) for player in sides[0]] for wish in sides[1]]
    if len({max(range(len(names)), key=row.__getitem__) for row in fits}) == count:
        return None
    chosen = linear_sum_assignment(fits, maximize=True)[1]
    groups = [
        [f"{name} {' '.join(map(str, numbers))}" for name, numbers in zip(called, side, strict=False)]
        for called, side in zip((names, POSITIONS), sides, strict=True)
    ]
    return " | ".join(" ".join(group) for group in groups), " ".join(names[player] for player in chosen)


def generate_lineup(settings: LineupData, seed: int) -> Made:
    """Games in which a position must take its second choice -> the players in the order of the positions."""
    rng, found = random.Random(seed), dict[str, str]()
    wanted = settings.valid + settings.test + settings.examples
    for _ in range(20 * wanted):
        if (made := draw_lineup(settings, rng)) is not None:
            found.setdefault(*made)
        if len(found) == wanted:
            break
    else:
        raise too_few(f"about {len(found):,} different games", wanted)
    pairs: Pairs = list(found.items())
    ends = settings.valid, settings.valid + settings.test
    return pairs[ends[1] :], pairs[: ends[0]], pairs[ends[0] : ends[1]]


def find_median(digits: list[int]) -> int:
    """The middle one, or what lies between the middle two, rounded down."""
    ordered, count = sorted(digits), len(digits)
    return (ordered[(count - 1) // 2] + ordered[count // 2]) // 2


OPERATIONS: dict[str, Callable[[list[int]], int]] = {
    "MAX": max,
    "MIN": min,
    "MED": find_median,
    "SM": lambda digits: sum(digits) % 10,
}


Levels = list[tuple[list[int], list[bool]]]
"""Of every level of a tree, from its root on: how many operands each list has, and which of them are lists again."""


def draw_levels(settings: ListopsData, rng: numpy.random.Generator) -> Levels | None:
    """The form of an expression; None: it is too short or too long. The last level that is allowed has digits alone.
    Two of three are refused, so this is drawn a level at a time, and written only where it is taken."""
    levels: Levels = []
    lists, tokens = 1, 1
    for level in range(1, settings.deepest):
        counts = rng.integers(2, settings.operands + 1, lists)
        inner = rng.random(int(counts.sum())) < settings.nested * (level < settings.deepest - 1)
        tokens += len(inner) + lists  # the operands, and a bracket for every list
        levels.append((counts.tolist(), inner.tolist()))
        lists = int(inner.sum())
        if not lists or tokens > settings.longest:
            break
    return levels if settings.shortest <= tokens <= settings.longest else None


def write_list(levels: Levels, rng: random.Random) -> tuple[list[str], int]:
    """The tokens of an expression of this form, and the digit that it comes to."""
    sides = [(iter(counts), iter(inner)) for counts, inner in levels]  # a level is read from left to right
    names = list(OPERATIONS)

    def write(level: int) -> tuple[list[str], int]:
        counts, inner = sides[level]
        name, digits = rng.choice(names), list[int]()
        tokens = [f"[{name}"]
        for _ in range(next(counts)):
            digit = int(10 * rng.random())
            written = [str(digit)]
            if next(inner):
                written, digit = write(level + 1)
            tokens += written
            digits.append(digit)
        return [*tokens, "]"], OPERATIONS[name](digits)

    return write(0)


def generate_listops(settings: ListopsData, seed: int) -> Made:
    """Expressions of the wanted lengths -> their digits, as labels."""
    rng, forms, found = random.Random(seed), numpy.random.default_rng(seed), dict[str, str]()
    wanted = settings.valid + settings.test + settings.examples
    fruitless = 0
    while len(found) < wanted:
        before = len(found)
        if (levels := draw_levels(settings, forms)) is not None:
            tokens, digit = write_list(levels, rng)
            found.setdefault(" ".join(tokens), str(digit))
        fruitless = fruitless + 1 if len(found) == before else 0
        if fruitless > 20_000:
            raise too_few(
                f"about {len(found):,} expressions of {settings.shortest} to {settings.longest} tokens", wanted
            )
    pairs: Pairs = list(found.items())
    ends = settings.valid, settings.valid + settings.test
    return pairs[ends[1] :], pairs[: ends[0]], pairs[ends[0] : ends[1]]


Generate = Callable[[Any, int], Sequence[Sequence[tuple[Any, ...]]]]
"""Three splits of sources and targets."""
GENERATORS: dict[str, Generate] = {
    "reverse": generate_reverse,
    "numbers": generate_numbers,
    "dates": generate_dates,
    "transduce": generate_transduce,
    "lineup": generate_lineup,
    "listops": generate_listops,
    "shapes": generate_shapes,
    "digits": generate_digits,
}
"""By `data.kind`."""
