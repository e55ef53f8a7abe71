"""The base of errors that users cause and can mend."""


class UserError(Exception):
    """The text is for the user: the problem and the remedy. It is no bug of swapd."""
