"""Start processes that run one command together: on this machine, or on the hosts of a Ray cluster.

One loop starts them again when one fails; engines only know how to place processes.
"""

from ._attempt import Failure as Failure
from ._engine import Ending as Ending
from ._engines import check_engine as check_engine
from ._hosts import RayHost as RayHost
from ._hosts import RayHosts as RayHosts
from ._hosts import cluster_of as cluster_of
from ._launch import Launched as Launched
from ._launch import LaunchError as LaunchError
from ._launch import launch as launch


def find_ray_hosts(address: str | None = None) -> RayHosts:
    """The hosts of a Ray cluster. Imports Ray."""
    from ._ray import find_hosts

    return find_hosts(address)
