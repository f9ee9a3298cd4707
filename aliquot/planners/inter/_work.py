"""The work that is left to a search."""


class WorkLeft:
    """Entries of tables that the solves of one search may still compute."""

    def __init__(self, limit: float) -> None:
        self.left = limit

    def spend(self, work: float) -> None:
        """Take some away; never below zero."""
        self.left = max(0.0, self.left - work)
