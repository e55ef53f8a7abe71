"""The base of errors that users cause, and can mend."""


class UserError(Exception):
    """An error whose text is for its user: the problem and the remedy. It shows no bug of swapd."""
