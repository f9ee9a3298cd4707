"""What is computed: a training step as plain data."""

from ._calling import FlatCall as FlatCall
from ._calling import calling_of as calling_of
from ._capture import build_graph as build_graph
from ._capture import capture as capture
from ._evaluate import ReplayHook as ReplayHook
from ._evaluate import evaluate as evaluate
from ._fingerprint import graph_fingerprint as graph_fingerprint
from ._fingerprint import interface_fingerprint as interface_fingerprint
from ._render import to_dot as to_dot
from ._render import to_text as to_text
from ._segments import Folding as Folding
from ._segments import Run as Run
from ._segments import fold as fold
from ._segments import wildcard as wildcard
from ._source import source_line as source_line
from ._types import Block as Block
from ._types import Call as Call
from ._types import Graph as Graph
from ._types import Input as Input
from ._types import Literal as Literal
from ._types import Op as Op
from ._types import Operand as Operand
from ._types import Output as Output
from ._types import Phase as Phase
from ._types import Role as Role
from ._types import Value as Value
