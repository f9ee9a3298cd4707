"""The best splits by integer linear programming, with a bound."""

from ._ilp import ILP as ILP
from ._ilp import Search as Search
from ._ilp import Work as Work
