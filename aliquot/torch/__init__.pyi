from ._apply import Applied as Applied
from ._apply import apply as apply
from ._operators import operator as operator
from ._plan import TorchStep as TorchStep
from ._plan import plan as plan
from ._plan import training_step as training_step
