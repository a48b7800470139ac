"""The error that a user can act on.

Anything a user can get wrong (a path, a file, a setting, a budget) raises `UserError` with one line that
says what is wrong, where, and what to do. The command line prints that line and exits with status 2; Python
callers may catch it as the `ValueError` it is. Other exceptions are defects of this software.
"""


class UserError(ValueError):
    """A bad call or bad input; the message is one clear line."""


class BudgetExceededError(UserError):
    """The next release would spend more than the target epsilon."""
