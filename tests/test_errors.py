"""The tree that errors.py draws is the tree that it defines."""

import re

from regard import errors


def test_tree_in_the_docstring_equals_the_classes():
    root, *branches = (name for name, value in vars(errors).items() if isinstance(value, type))
    drawn = re.findall(r"^    (├── |└── |)(\w+)", errors.__doc__, re.MULTILINE)
    assert drawn == [("", root), *(("├── ", name) for name in branches[:-1]), ("└── ", branches[-1])]
    assert getattr(errors, root).__bases__ == (Exception,)
    assert {getattr(errors, name).__bases__ for name in branches} == {(errors.RegardError,)}
