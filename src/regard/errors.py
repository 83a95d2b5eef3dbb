"""What can go wrong for a user, as one tree. Anything else that is raised is a bug of ours.

    RegardError
    ├── ConfigError      a setting is unknown, mistyped or contradicts another
    ├── DataError        a file cannot be read, or does not say what was expected
    ├── RunError         a directory is not a run, or its files are damaged
    ├── InputError       a text to predict that the model cannot take
    └── TrainError       training cannot go on (the loss is not a number)

A message says what was wanted, what came, where, and what to do. The command line prints it without a traceback
and exits with status 2.
"""


class RegardError(Exception):
    """Base of every error that is the user's to read."""


class ConfigError(RegardError):
    """A setting is unknown, mistyped or contradicts another."""


class DataError(RegardError):
    """A data file cannot be read, or does not say what was expected."""


class RunError(RegardError):
    """A directory is not a run, or one of its files is damaged."""


class InputError(RegardError):
    """A text that was given to a trained model cannot be taken by it."""


class TrainError(RegardError):
    """Training cannot go on."""
