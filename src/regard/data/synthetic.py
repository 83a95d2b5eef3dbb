"""Parallel data that is made, exact and endless: reversed strings, number words, dates as people write them.

A generator gives three splits that never share a source; it is a pure function of its settings and the seed.
"""

import datetime
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from regard.config.data import DatesData, GeneratedData, NumbersData, ReverseData
from regard.data.examples import Example, Ledger, Splits, fingerprint
from regard.errors import ConfigError


def make_splits(
    train: Iterable[tuple[str, str]], valid: Iterable[tuple[str, str]], test: Iterable[tuple[str, str]]
) -> Splits:
    """Name every example's place, and count."""
    made = {
        name: [Example(source, target, f"{name}:{number}") for number, (source, target) in enumerate(pairs, 1)]
        for name, pairs in (("train", train), ("valid", valid), ("test", test))
    }
    ledgers = {name: Ledger(read=len(examples), kept=len(examples)) for name, examples in made.items()}
    return Splits(made["train"], made["valid"], made["test"], ledgers)


def draw_distinct(draw: Callable[[], tuple[str, str]], settings: GeneratedData) -> Splits:
    """Draw pairs. A fifth of all sources, by their hash, can be held out, also of the short ones; those come once; the
    others can be trained on."""
    wanted = settings.valid + settings.test
    held: dict[str, str] = {}
    train: list[tuple[str, str]] = []
    fruitless = 0
    while len(held) < wanted or len(train) < settings.examples:
        fruitless += 1
        source, target = draw()
        if int(fingerprint(source), 16) % 5 == 0:
            if len(held) < wanted and source not in held:
                held[source] = target
                fruitless = 0
        elif len(train) < settings.examples:
            train.append((source, target))
            fruitless = 0
        if fruitless > 2000:
            raise too_few(f"{len(held):,} sources to hold out (a fifth of all)", wanted)
    pairs = list(held.items())
    random.Random(wanted).shuffle(pairs)
    return make_splits(train, pairs[: settings.valid], pairs[settings.valid :])


def too_few(there: str, wanted: int) -> ConfigError:
    """The error for more examples than can be made."""
    return ConfigError(
        f"data: there are only {there}, but {wanted:,} are wanted. "
        "Make data.examples, data.valid or data.test smaller, or the task larger."
    )


def generate_reverse(settings: ReverseData, seed: int) -> Splits:
    """Letters, and the same letters backwards."""
    rng = random.Random(seed)
    return draw_distinct(lambda: reverse(settings, rng), settings)


def reverse(settings: ReverseData, rng: random.Random) -> tuple[str, str]:
    """One pair."""
    size = rng.randint(settings.shortest, max(settings.shortest, settings.longest))
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz"[: settings.letters], k=size))
    return letters, letters[::-1]


def generate_numbers(settings: NumbersData, seed: int) -> Splits:
    """Number words -> digits. The lengths one to `digits` come equally often as far as there are that many numbers;
    of no length is more than a fifth held out, so the shortest numbers are mostly seen."""
    rng, words = random.Random(seed), number_words(settings.language)
    held = draw_stratified(settings.valid + settings.test, settings.digits, 0.2, set(), rng)
    taken = set(held)
    train = draw_stratified(settings.examples, settings.digits, 1.0, taken, rng)
    for name, made, count in (
        ("held-out", held, settings.valid + settings.test),
        ("training", train, settings.examples),
    ):
        if len(made) < count:
            raise too_few(f"{len(made):,} {name} numbers of up to {settings.digits} digits", count)
    rng.shuffle(held)
    rng.shuffle(train)
    pair = [(words(number), str(number)) for number in held]
    return make_splits(((words(n), str(n)) for n in train), pair[: settings.valid], pair[settings.valid :])


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


PATTERNS = ("short", "medium", "long", "full")


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
        for name in PATTERNS:
            pattern = re.sub("y+", "y", locale.date_formats[name].pattern)
            order = "".join(re.findall("[yMd]", re.sub(r"(.)\1+", r"\1", pattern)))
            separators = re.sub("[yMd ]", "", pattern)
            if orders.setdefault(separators, order) == order or name != "short":
                forms[locale, name] = pattern
    return [(locale, pattern) for (locale, _), pattern in forms.items()]


def generate_dates(settings: DatesData, seed: int) -> Splits:
    """Dates as babel writes them in several languages -> ISO 8601. The days, not only their spellings, of the three
    splits differ, and every source has one answer."""
    from babel.dates import format_date

    rng, forms = random.Random(seed), date_forms(settings.languages)
    first = datetime.date(settings.first_year, 1, 1).toordinal()
    last = datetime.date(settings.last_year, 12, 31).toordinal()
    meanings: dict[str, str] = {}

    def draw(rests: range) -> tuple[str, str]:
        while (day := rng.randint(first, last)) % 20 not in rests:
            pass
        locale, pattern = rng.choice(forms)
        date = datetime.date.fromordinal(day)
        return format_date(date, pattern, locale=locale), date.isoformat()

    def take(count: int, rests: range, unique: bool) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = []
        for _ in range(50 * count):
            source, target = draw(rests)
            if (known := meanings.get(source)) is not None and (unique or known != target):
                continue
            meanings[source] = target
            pairs.append((source, target))
            if len(pairs) == count:
                return pairs
        raise too_few(f"{len(pairs):,} different dates in these languages and years", count)

    valid = take(settings.valid, range(1), unique=True)  # every twentieth day
    test = take(settings.test, range(1, 2), unique=True)
    return make_splits(take(settings.examples, range(2, 20), unique=False), valid, test)


GENERATORS: dict[str, Callable[[Any, int], Splits]] = {
    "reverse": generate_reverse,
    "numbers": generate_numbers,
    "dates": generate_dates,
}
"""By `data.kind`."""
