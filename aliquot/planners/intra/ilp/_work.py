"""The work that branching may take."""

# Less than this share of all work is not worth starting with.
_LEAST_SHARE = 0.1


class Work:
    """Remaining work for branching, shared by all spaces of a problem: pivots times rows."""

    def __init__(self, limit: float) -> None:
        self.left = limit
        self._limit = limit

    @property
    def is_spent(self) -> bool:
        """True if what is left is not worth starting with."""
        return self.left <= 0 or self.left < _LEAST_SHARE * self._limit
