"""The best splits by integer linear programming, with a bound."""

from ._ilp import ILP as ILP
from ._solve import Search as Search
