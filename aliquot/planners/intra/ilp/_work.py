"""The limit on the work of branching."""

# No integer program is started with less than this share of the limit.
_LEAST_SHARE = 0.1


class Work:
    """The work left for branching, in pivots times rows, which all spaces of a problem share."""

    def __init__(self, limit: float) -> None:
        self.left = limit
        self._limit = limit

    @property
    def is_spent(self) -> bool:
        """True if too little work is left to start an integer program."""
        return self.left <= 0 or self.left < _LEAST_SHARE * self._limit
