"""Start processes that run one command together: on this machine, or on the hosts of a Ray cluster.

One loop starts them again when one fails; engines only know how to place processes.
"""

from ._attempt import Failure as Failure
from ._engine import Ending as Ending
from ._launch import Launched as Launched
from ._launch import LaunchError as LaunchError
from ._launch import launch as launch
