"""The best splits by integer linear programming, with a bound."""

from ._layout import Layouts as Layouts
from ._solve import Search as Search
from ._solve import Solution as Solution
