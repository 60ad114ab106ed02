"""Why a benchmark cannot be run here."""


class UnavailableError(Exception):
    """Something it needs is missing; the text is one line that says what to do."""
