"""Metrics of captions with several references: BLEU-1 to 4, CIDEr-D and ROUGE-L, as COCO's evaluation defines them.

Captions are compared in words: small letters, without punctuation, "man's" as two words (`tokenize_caption`). COCO's
scripts leave that to a Java program; these rules follow it, except that brackets do not count as words.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

References = Sequence[Sequence[str]]
"""Of every output, one or more right answers."""
Ngram = tuple[str, ...]
Vectors = list[dict[Ngram, float]]
"""The tf-idf weights of a caption's n-grams, for every n."""

LONGEST = 4
"""Words of the longest n-grams."""
SIGMA = 6.0
"""CIDEr-D's deviation of lengths."""
BETA = 1.2
"""ROUGE-L's weight of recall."""

WORD = re.compile(
    r"""
    \d+(?:[.,:]\d+)+                # 3.5 and 10:30
    | \w+?(?=n['’]t\b) | n['’]t\b   # do n't
    | ['’](?:s|re|ve|ll|d|m)\b      # man 's
    | \w+(?:-\w+)*                  # t-shirt
    | [^\s\w.,:;?!'’‘`"“”()\[\]{}…–—-]
    """,
    re.VERBOSE,
)


class Scores(NamedTuple):
    """A metric of all captions together, and of each by itself."""

    corpus: float
    each: list[float]


def tokenize_caption(text: str) -> list[str]:
    """The words of a caption: clitics apart, hyphens kept inside words, punctuation dropped."""
    return [word.replace("’", "'") for word in WORD.findall(text.lower())]


def score_bleu(hypotheses: Sequence[str], references: References, order: int = LONGEST) -> Scores:
    """BLEU of n-grams up to an order, from 0 to 1: of the whole corpus without smoothing, against the reference whose
    length is closest (sacreBLEU counts)."""
    from sacrebleu.metrics.bleu import BLEU

    counter: Any = BLEU(tokenize="none", smooth_method="none", max_ngram_order=order, force=True)

    def score(outputs: list[str], wanted: list[list[str]]) -> float:
        longest = max(map(len, wanted), default=0)
        streams = [[row[number] if number < len(row) else None for row in wanted] for number in range(longest)]
        found = counter.corpus_score(outputs, streams)
        if not all(found.counts):
            return 0.0
        shares = [right / given for right, given in zip(found.counts, found.totals, strict=True)]
        return float(found.bp) * math.exp(sum(map(math.log, shares)) / order)

    outputs = [" ".join(tokenize_caption(text)) for text in hypotheses]
    wanted = [[" ".join(tokenize_caption(text)) for text in row] for row in references]
    each = [score([output], [row]) for output, row in zip(outputs, wanted, strict=True)]
    return Scores(score(outputs, wanted) if outputs else math.nan, each)


# --- CIDEr-D ---------------------------------------------------------------------------------------------------------


class DocumentFrequencies(NamedTuple):
    """In how many images' references each n-gram comes, and how many images there are."""

    counts: Mapping[Ngram, int]
    images: int


def count_documents(references: References) -> DocumentFrequencies:
    """The frequencies of references; of a training set, where captions are scored while a model learns from them."""
    counts = Counter[Ngram]()
    for row in references:
        counts.update({ngram for text in row for ngram in count_ngrams(tokenize_caption(text))})
    return DocumentFrequencies(counts, len(references))


def count_ngrams(words: Sequence[str]) -> Counter[Ngram]:
    """How often each n-gram comes, of every n up to the longest."""
    starts = ((start, n) for n in range(1, LONGEST + 1) for start in range(len(words) - n + 1))
    return Counter(tuple(words[start : start + n]) for start, n in starts)


class Weighed(NamedTuple):
    """A caption as CIDEr-D compares it."""

    words: int
    vectors: Vectors


def score_cider(
    hypotheses: Sequence[str], references: References, frequencies: DocumentFrequencies | None = None
) -> Scores:
    """CIDEr-D (Vedantam 2015, section 5), from 0 to 10, of the frequencies of the references unless others are
    given."""
    known = frequencies or count_documents(references)
    rows = ([weigh_caption(text, known) for text in row] for row in references)
    each = [compare_captions(weigh_caption(text, known), row) for text, row in zip(hypotheses, rows, strict=True)]
    return Scores(sum(each) / len(each) if each else math.nan, each)


def weigh_caption(text: str, known: DocumentFrequencies) -> Weighed:
    """A caption as it is compared, by the frequencies that are known."""
    words = tokenize_caption(text)
    return Weighed(len(words), weigh_ngrams(words, known))


def compare_captions(caption: Weighed, references: Sequence[Weighed]) -> float:
    """CIDEr-D of one caption: the mean over references and n of the clipped cosine of tf-idf vectors, less the further
    the lengths are apart."""
    total = 0.0
    for other in references:
        penalty = math.exp(-((caption.words - other.words) ** 2) / (2 * SIGMA**2))
        pairs = zip(caption.vectors, other.vectors, strict=True)
        total += penalty * sum(compare_clipped(*pair) for pair in pairs) / LONGEST
    return 10 * total / len(references)


def weigh_ngrams(words: Sequence[str], known: DocumentFrequencies) -> Vectors:
    """The tf-idf vectors of a caption (Eq. 1); an n-gram that no reference has counts as one of a single image."""
    vectors: Vectors = [{} for _ in range(LONGEST)]
    for ngram, count in count_ngrams(words).items():
        rarity = math.log(known.images) - math.log(max(1, known.counts.get(ngram, 0)))
        vectors[len(ngram) - 1][ngram] = count * rarity
    return vectors


def compare_clipped(vector: dict[Ngram, float], other: dict[Ngram, float]) -> float:
    """The cosine of two vectors, in which a caption gains nothing by saying a thing more often than the reference."""
    norm = math.hypot(*vector.values()) * math.hypot(*other.values())
    dot = sum(min(weight, other[ngram]) * other[ngram] for ngram, weight in vector.items() if ngram in other)
    return dot / norm if norm else 0.0


# --- ROUGE-L ---------------------------------------------------------------------------------------------------------


def score_rouge_l(hypotheses: Sequence[str], references: References) -> Scores:
    """ROUGE-L as COCO's scripts have it, from 0 to 1: F of the best precision and the best recall among the references,
    which may be of two of them."""
    each = []
    for text, row in zip(hypotheses, references, strict=True):
        words, others = tokenize_caption(text), [tokenize_caption(one) for one in row]
        common = [(count_common(words, other), len(other)) for other in others]
        precision = max(same / max(1, len(words)) for same, _ in common)
        recall = max(same / max(1, length) for same, length in common)
        both = recall + BETA**2 * precision
        each.append((1 + BETA**2) * precision * recall / both if both else 0.0)
    return Scores(sum(each) / len(each) if each else math.nan, each)


def count_common(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for word in left:
        corner = 0
        for place, other in enumerate(right, 1):
            corner, row[place] = row[place], corner + 1 if word == other else max(row[place], row[place - 1])
    return row[-1]
