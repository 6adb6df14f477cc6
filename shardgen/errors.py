"""The one error that people are meant to read."""


class UserError(ValueError):
    """Something the user can mend: one line that names the value, the limit and the way out.

    The command line prints it as ``error: ...`` and exits with 1, without a traceback.
    """
