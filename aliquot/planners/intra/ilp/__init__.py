"""The best splits by integer linear programming, with a bound."""

from ._ilp import ILP as ILP
from ._search import Search as Search
from ._search import Work as Work
