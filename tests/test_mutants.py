"""The lists of planted bugs (scripts/mutants): each can be planted, in one place, and is valid Python."""

import pytest
from mutate import ROOT, plant, read_mutants

ROOMS = {path.parent.name for path in (ROOT / "src" / "regard").glob("*/__init__.py")}


def test_every_room_has_planted_bugs():
    assert {mutant.room for mutant in read_mutants()} == ROOMS


def test_no_bug_is_planted_twice():
    planted = [(mutant.file, mutant.find, mutant.replace) for mutant in read_mutants()]
    assert sorted({one for one in planted if planted.count(one) > 1}) == []


@pytest.mark.parametrize("mutant", read_mutants(), ids=str)
def test_a_bug_is_well_formed_and_has_one_place(mutant):
    assert mutant.file.startswith("src/regard/")
    assert mutant.find != mutant.replace
    assert mutant.why == mutant.why.strip()
    assert "\n" not in mutant.why
    assert mutant.why[-1:] not in ("", ".")
    text = plant(mutant)
    if mutant.file.endswith(".py"):
        compile(text, mutant.file, "exec")
