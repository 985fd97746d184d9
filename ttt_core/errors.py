"""One exception for everything a user can put right: its text says what, where and what to do."""


class TTTError(ValueError):
    """Bad input, in one sentence meant for the user."""
