"""What trained models look at is what they should: the anti-diagonal, and the word order that turns round."""

import pytest
from num2words import num2words

from regard.config.toml import read
from regard.evaluation.fit import fit
from regard.explain.look import look
from regard.inference.load import load
from regard.training.prepare import start_run

pytestmark = pytest.mark.weekly


def trained(recipe, folder):
    config = read(recipe)
    prepared = start_run(config, folder)
    fit(prepared, folder, lambda event: None, device="cpu")
    return load(folder, device="cpu"), prepared.splits.test


def test_reversing_looks_along_the_anti_diagonal(tmp_path):
    predictor, examples = trained("reverse", tmp_path / "run")
    right = total = 0
    for example in examples[:300]:
        found = look(predictor, example.source)
        pairs = found.align()[:-1]
        right += sum(column == len(example.source) - 1 - row for row, column in pairs)
        total += len(pairs)
    assert total > 1000
    assert right / total >= 0.95


def test_german_tens_are_looked_for_behind_the_ones(tmp_path):
    """21 is einundzwanzig: the digit 2 looks at -zwanzig, the digit 1 before it at ein-."""
    predictor, _ = trained("numbers", tmp_path / "run")
    right = total = 0
    for number in (n for n in range(21, 100) if n % 10 and n not in (22, 33, 44, 55, 66, 77, 88, 99)):
        word = num2words(number, lang="de")
        found = look(predictor, word)
        if found.answer.text != str(number):
            continue
        middle = word.index("und") + 3
        tens, ones = (found.tokens["key"][column] for _, column in found.align()[:2])
        right += tens.end > middle and ones.start < middle - 3
        total += 1
    assert total >= 60
    assert right / total >= 0.95
