"""The best splits by integer linear programming, with a bound."""

from ._solve import Search as Search
from ._solve import Solution as Solution
