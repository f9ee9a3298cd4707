"""The work that a search has left."""


class WorkLeft:
    """The number of table entries that the solves of one search may still compute."""

    def __init__(self, limit: float) -> None:
        self.left = limit

    def spend(self, work: float) -> None:
        """Subtract work; what is left never goes below zero."""
        self.left = max(0.0, self.left - work)
