"""Declarations of JAX's primitives, one file per family. Importing the package registers them."""

from . import attention as attention
from . import contract as contract
from . import control as control
from . import conv as conv
from . import custom as custom
from . import elementwise as elementwise
from . import experts as experts
from . import gather as gather
from . import kernel as kernel
from . import linalg as linalg
from . import random as random
from . import reduce as reduce
from . import shape as shape
from ._factors import Factors as Factors
