"""How a task is asked over HTTP and shown on the page; the words, in English and Korean, are in forms.toml.

The page's scripts know no task: all that differs between tasks comes from here (docs/serve.md).
"""

import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

Tree = dict[str, Any]


class Form(NamedTuple):
    """A task on the page. Words are by language: {"en": .., "ko": ..}."""

    fields: list[Tree]  # what a person types: name, label, and rows of a text area (1: one line)
    submit: dict[str, str]
    empty: dict[str, str]
    lines: list[Tree]  # the axes of maps that are shown as lines of tokens: axis, title
    groups: list[Tree]  # maps with the same rows and columns: their title, and whether they are told apart by layers
    answer: Literal["line", "large", "spans", "none"] = "large"
    """The answer is one of the lines, is shown in large letters or as coloured spans of the text, or there is none."""
    answers: Literal["list", "bars", "none"] = "list"
    """The other answers: an n-best list; a bar for each of the query axis; or none are shown."""
    settings: list[str] = []  # noqa: RUF012 (nobody changes it)
    """Decoding settings that count."""
    best: int = 1  # answers that the page asks for
    streams: bool = False  # whether the answer is written token by token, by /v1/completions


def read_forms() -> dict[str, Form]:
    """The forms of the package's own tasks; maps are told apart by layers unless a group says otherwise."""
    trees = tomllib.loads(Path(__file__).with_name("forms.toml").read_text("utf-8"))
    for tree in trees.values():
        tree["groups"] = [{"layered": True, **group} for group in tree["groups"]]
    return {name: Form(**tree) for name, tree in trees.items()}


FORMS = read_forms()
