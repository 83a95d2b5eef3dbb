"""Parallel data that is made, exact and endless: reversed strings, number words, dates as people write them.

A generator gives three splits that never share a source; it is a pure function of its settings and the seed.
"""

import datetime
import random
import re
from collections.abc import Callable, Iterable

from regard.config import DatesData, GeneratedData, NumbersData, ReverseData
from regard.data import Example, Ledger, Splits, fingerprint
from regard.errors import ConfigError


def generate(settings: GeneratedData, seed: int) -> Splits:
    """Make the splits of a generated task."""
    rng = random.Random(seed)
    match settings:
        case ReverseData():
            return distinct(lambda: reverse(settings, rng), settings)
        case NumbersData():
            return numbers(settings, rng)
        case DatesData():
            return dates(settings, rng)
    raise TypeError(settings)


def splits(
    train: Iterable[tuple[str, str]], valid: Iterable[tuple[str, str]], test: Iterable[tuple[str, str]]
) -> Splits:
    """Name every example's place, and count."""
    made = {
        name: [Example(source, target, f"{name}:{number}") for number, (source, target) in enumerate(pairs, 1)]
        for name, pairs in (("train", train), ("valid", valid), ("test", test))
    }
    ledgers = {name: Ledger(read=len(examples), kept=len(examples)) for name, examples in made.items()}
    return Splits(made["train"], made["valid"], made["test"], ledgers)


def distinct(draw: Callable[[], tuple[str, str]], settings: GeneratedData) -> Splits:
    """Draw held-out pairs without repetition, then training pairs whose source is none of theirs."""
    held: dict[str, str] = {}
    tries = 0
    while len(held) < settings.valid + settings.test:
        source, target = draw()
        if int(fingerprint(source), 16) % 5 == 0:  # a fifth of the sources at most, also of the short ones
            held.setdefault(source, target)
        tries += 1
        if tries > 1000 * (settings.valid + settings.test):
            raise ConfigError(
                f"data.{getattr(settings, 'kind', '')} has only {len(held):,} different sources, too few to hold "
                f"{settings.valid:,} + {settings.test:,} out. Make data.valid and data.test smaller."
            )
    train = []
    for _ in range(100 * settings.examples):
        pair = draw()
        if pair[0] not in held:
            train.append(pair)
        if len(train) == settings.examples:
            break
    pairs = list(held.items())
    rng = random.Random(len(pairs))
    rng.shuffle(pairs)
    return splits(train, pairs[: settings.valid], pairs[settings.valid :])


def reverse(settings: ReverseData, rng: random.Random) -> tuple[str, str]:
    """Letters, and the same letters backwards."""
    size = rng.randint(settings.shortest, max(settings.shortest, settings.longest))
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz"[: settings.letters], k=size))
    return letters, letters[::-1]


def numbers(settings: NumbersData, rng: random.Random) -> Splits:
    """Number words -> digits. The lengths one to `digits` come equally often as far as there are that many numbers;
    of no length is more than a fifth held out, so the shortest numbers are mostly seen."""
    words = number_words(settings.language)
    held = stratified(settings.valid + settings.test, settings.digits, 0.2, set(), rng)
    taken = set(held)
    train = stratified(settings.examples, settings.digits, 1.0, taken, rng)
    rng.shuffle(held)
    rng.shuffle(train)
    pair = [(words(number), str(number)) for number in held]
    return splits(((words(n), str(n)) for n in train), pair[: settings.valid], pair[settings.valid :])


def stratified(count: int, digits: int, share: float, taken: set[int], rng: random.Random) -> list[int]:
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
    return lambda number: str(num2words(number, lang=language))


PATTERNS = ("short", "medium", "long", "full")


def dates(settings: DatesData, rng: random.Random) -> Splits:
    """Dates as babel writes them in several languages -> ISO 8601. The days, not only their spellings, of the three
    splits differ. Every source has one answer: years are written out, and of two languages whose short forms differ in
    order alone (3/4/2020), only the one named first writes it."""
    from babel import Locale, UnknownLocaleError
    from babel.dates import format_date

    try:
        locales = [Locale.parse(name.replace("-", "_")) for name in settings.languages]
    except (UnknownLocaleError, ValueError) as error:
        raise ConfigError(f"data.languages: babel has no locale {error}.") from error
    patterns: dict[Locale, dict[str, str]] = {}
    orders: dict[str, str] = {}
    for locale in locales:
        for name in PATTERNS:
            pattern = re.sub("y+", "y", locale.date_formats[name].pattern)
            order = "".join(re.findall("[yMd]", re.sub(r"(.)\1+", r"\1", pattern)))
            separators = re.sub("[yMd ]", "", pattern)
            if orders.setdefault(separators, order) == order or name != "short":
                patterns.setdefault(locale, {})[name] = pattern
    forms = [(locale, pattern) for locale, named in patterns.items() for pattern in named.values()]
    first = datetime.date(settings.first_year, 1, 1).toordinal()
    last = datetime.date(settings.last_year, 12, 31).toordinal()

    meanings: dict[str, str] = {}

    def draw(held: bool) -> tuple[str, str]:
        while True:
            day = rng.randint(first, last)
            if (day % 10 == 0) == held:  # every tenth day is held out
                break
        locale, pattern = rng.choice(forms)
        date = datetime.date.fromordinal(day)
        return format_date(date, pattern, locale=locale), date.isoformat()

    def take(count: int, held: bool, unique: bool) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = []
        for _ in range(50 * count):
            source, target = draw(held)
            if (known := meanings.get(source)) is not None and (unique or known != target):
                continue
            meanings[source] = target
            pairs.append((source, target))
            if len(pairs) == count:
                return pairs
        raise ConfigError(f"data: these languages and years give too few dates for {count:,} examples.")

    held = take(settings.valid + settings.test, held=True, unique=True)
    return splits(take(settings.examples, held=False, unique=False), held[: settings.valid], held[settings.valid :])
