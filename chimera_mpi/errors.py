"""What the user is told."""


class InputError(ValueError):
    """What was asked for cannot be had. The message is one line: the value, the limit and the remedy."""
