"""Metrics of captions, against the papers' equations written out and against COCO's own scripts."""

import itertools
import math
import random

import pytest

from regard.evaluation.metrics import score
from regard.tasks.vision.caption_metrics import (
    count_documents,
    score_bleu,
    score_cider,
    score_rouge_l,
    tokenize_caption,
)

WORDS = ["a", "the", "dog", "cat", "man", "runs", "sits", "on", "in", "red", "blue", "grass"]


def make_captions(seed, count=17):
    """Captions and references of random words: of different lengths and counts, some right, one empty."""
    rng = random.Random(seed)

    def sentence(least=1):
        return " ".join(rng.choices(WORDS, k=rng.randint(least, 9)))

    references = [[sentence() for _ in range(rng.randint(1, 5))] for _ in range(count)]
    hypotheses = [rng.choice([sentence(0), rng.choice(row), f"{rng.choice(row)} dog dog"]) for row in references]
    return ["", *hypotheses], [["a dog"], *references]


# --- by the equations ------------------------------------------------------------------------------------------------


def list_ngrams(words, n):
    """All n-grams, with repetitions."""
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]


def cider_by_the_paper(hypotheses, references, n):
    """CIDEr-D_n of every caption, Eq. 1 and section 5 of Vedantam 2015, over the whole vocabulary of n-grams."""
    captions, rows = [text.split() for text in hypotheses], [[text.split() for text in row] for row in references]
    every = {gram for words in [*captions, *itertools.chain(*rows)] for gram in list_ngrams(words, n)}
    inverse = {
        gram: math.log(len(rows) / max(1, sum(any(gram in list_ngrams(text, n) for text in row) for row in rows)))
        for gram in every
    }

    def vector(words):
        return {gram: list_ngrams(words, n).count(gram) * inverse[gram] for gram in every}

    def norm(vector):
        return math.sqrt(sum(weight**2 for weight in vector.values()))

    found = []
    for words, row in zip(captions, rows, strict=True):
        total, given = 0.0, vector(words)
        for other in row:
            wanted = vector(other)
            clipped = sum(min(given[gram], wanted[gram]) * wanted[gram] for gram in every)
            both = norm(given) * norm(wanted)
            total += math.exp(-((len(words) - len(other)) ** 2) / (2 * 6**2)) * (clipped / both if both else 0.0)
        found.append(10 * total / len(row))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_cider_is_that_of_the_paper(seed):
    hypotheses, references = make_captions(seed)
    by_order = [cider_by_the_paper(hypotheses, references, n) for n in (1, 2, 3, 4)]
    found = score_cider(hypotheses, references)
    assert found.each == pytest.approx([sum(row) / 4 for row in zip(*by_order, strict=True)], abs=1e-12)
    assert found.corpus == pytest.approx(sum(found.each) / len(found.each))
    assert score("cider", hypotheses, references) == 100 * found.corpus


def subsequences(words):
    """All of them."""
    return {words[:0], *(part for size in range(len(words) + 1) for part in itertools.combinations(words, size))}


@pytest.mark.parametrize("seed", range(3))
def test_rouge_by_all_subsequences(seed):
    hypotheses, references = make_captions(seed)
    for text, row, found in zip(hypotheses, references, score_rouge_l(hypotheses, references).each, strict=True):
        words = tuple(text.split())
        if not words:
            assert found == 0
            continue
        others = [tuple(one.split()) for one in row]
        longest = [max(map(len, subsequences(words) & subsequences(other))) for other in others]
        precision = max(same / len(words) for same in longest)
        recall = max(same / len(other) for same, other in zip(longest, others, strict=True))
        expected = 2.44 * precision * recall / (recall + 1.44 * precision) if precision else 0
        assert found == pytest.approx(expected, abs=1e-12)


def test_bleu_by_hand():
    """Two captions: 5 of 7 words are in a reference as often (the, the, cat, a, dog), and 2 of 5 pairs (the cat, a
    dog). The closest references are 3 words long each."""
    hypotheses = ["the the the cat", "a dog runs"]
    references = [["the cat the", "a cat sits on the grass"], ["a dog sits"]]
    one, two = 5 / 7, 2 / 5
    assert score_bleu(hypotheses, references, 1).corpus == pytest.approx(one)
    assert score_bleu(hypotheses, references, 2).corpus == pytest.approx(math.sqrt(one * two))
    assert score_bleu(hypotheses, references, 3).corpus == 0
    assert score_bleu(["a dog"], [["a dog runs on"]], 2).corpus == pytest.approx(math.exp(1 - 4 / 2))
    assert score_bleu(hypotheses, references, 1).each == pytest.approx([3 / 4, 2 / 3])
    assert score("bleu2", hypotheses, references) == pytest.approx(100 * math.sqrt(one * two))


# --- against COCO's scripts ------------------------------------------------------------------------------------------


def as_coco(captions):
    """Captions by the number of their image."""
    return {number: [text] if isinstance(text, str) else text for number, text in enumerate(captions)}


@pytest.mark.parametrize("seed", range(5))
def test_cider_and_rouge_are_those_of_coco(seed):
    cider = pytest.importorskip("pycocoevalcap.cider.cider")
    rouge = pytest.importorskip("pycocoevalcap.rouge.rouge")
    hypotheses, references = make_captions(seed, 41)
    for theirs, ours in ((cider.Cider(), score_cider), (rouge.Rouge(), score_rouge_l)):
        corpus, each = theirs.compute_score(as_coco(references), as_coco(hypotheses))
        found = ours(hypotheses, references)
        assert found.corpus == pytest.approx(corpus, abs=1e-12)
        assert found.each == pytest.approx(list(each), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_bleu_is_that_of_coco(seed):
    """COCO adds 1e-15 and 1e-9 to counts, so that nothing is divided by zero: then a caption that is shorter than the
    order gets the root of a millionth, not 0, and one without a match the root of 1e-15."""
    bleu = pytest.importorskip("pycocoevalcap.bleu.bleu_scorer")
    hypotheses, references = make_captions(seed, 41)
    theirs = bleu.BleuScorer(n=4)
    for text, row in zip(hypotheses, references, strict=True):
        theirs += (text, row)
    corpus, each = theirs.compute_score(option="closest")
    for order in (1, 2, 3, 4):
        found = score_bleu(hypotheses, references, order)
        assert found.corpus == pytest.approx(corpus[order - 1], abs=1e-7)
        long = [number for number, text in enumerate(hypotheses) if len(text.split()) >= order]
        assert [found.each[n] for n in long] == pytest.approx([each[order - 1][n] for n in long], abs=1e-3)


# --- invariances -----------------------------------------------------------------------------------------------------


def test_perfect_and_hopeless_captions():
    references = [["a dog runs on the grass", "the dog"], ["the red cat sits", "a cat"], ["a man in blue", "the man"]]
    perfect, hopeless = [row[0] for row in references], ["one two three four five"] * 3
    for measure in (score_bleu, score_rouge_l):
        assert measure(perfect, references).corpus == pytest.approx(1)
        assert measure(hopeless, references).corpus == 0
    assert score_cider(perfect, [row[:1] for row in references]).corpus == pytest.approx(10)
    assert score_cider(hopeless, references).corpus == 0


@pytest.mark.parametrize("measure", [score_bleu, score_cider, score_rouge_l])
def test_the_order_of_references_and_how_they_are_written_do_not_matter(measure):
    hypotheses, references = make_captions(3)
    shown = measure(hypotheses, references)
    turned = measure(
        [f"  {text.upper()} ." for text in hypotheses], [[f'"{one}!"' for one in row[::-1]] for row in references]
    )
    assert turned.each == pytest.approx(shown.each, abs=1e-12)
    assert turned.corpus == pytest.approx(shown.corpus, abs=1e-12)
    assert math.isnan(measure([], []).corpus)


def test_frequencies_of_other_references():
    """A caption can be scored alone when its frequencies are known; by its own references nothing of it is rare."""
    hypotheses, references = make_captions(4)
    known = count_documents(references)
    whole = score_cider(hypotheses, references)
    for number in range(len(hypotheses)):
        alone = hypotheses[number : number + 1], references[number : number + 1]
        assert score_cider(*alone, known).each == pytest.approx([whole.each[number]])
        assert score_cider(*alone).each == [0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A man's dog doesn't run .", "a man 's dog does n't run"),
        ("Two T-shirts - red, blue; and (green)!", "two t-shirts red blue and green"),
        ("He said: “they’re here…”", "he said they 're here"),
        ("at 10:30 it cost $3.50, or 5%", "at 10:30 it cost $ 3.50 or 5 %"),
        ("한 남자가 개와 걷는다.", "한 남자가 개와 걷는다"),
        (" ... ", ""),
    ],
)
def test_words_of_a_caption(text, words):
    assert " ".join(tokenize_caption(text)) == words
