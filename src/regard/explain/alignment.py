"""Words that two looks agree on."""

from regard.explain.look import Look


def agree(there: Look, back: Look) -> list[tuple[str, str]]:
    """Words that look at each other both ways: of a translation, and of its translation back by a run of the other
    direction, whose source is the answer. Pairs (word of the answer, word of the text), in the answer's order."""
    forth = there.align_words()
    other = {(source, answer) for answer, source in back.align_words()}
    words = there.answer.text.split(), there.text.split()
    return [(words[0][answer], words[1][source]) for answer, source in forth if (answer, source) in other]
