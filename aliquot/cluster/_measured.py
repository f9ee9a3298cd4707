"""Corrections between the cost model and the prices that planners see, where devices were
measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ._cluster import Link


MEASURED, MEASURED_COMPUTE = "measured", "measured-compute"
"""Grades of measurements: all devices running together; or the computing of one device, measured on
one alone.
"""


class Corrections(NamedTuple):
    """For each of some points: measured over modelled seconds, whether this rests on a measurement
    nearby, and its relative error.

    `grade` is that of the measurements: `MEASURED` or `MEASURED_COMPUTE`.
    """

    ratios: NDArray[np.float64]
    is_measured: NDArray[np.bool_]
    errors: NDArray[np.float64]
    grade: str = MEASURED


class AbstractMeasured(ABC):
    """Measurements of a cluster's devices, frozen for planning: they correct the seconds of the
    cost model.
    """

    @abstractmethod
    def correct(
        self, kind: str, points: NDArray[np.float64], seconds: NDArray[np.float64]
    ) -> Corrections:
        """Corrections of modelled times.

        Args:
            kind: what is priced, such as `"product bfloat16"` or `"all-reduce in host"`.
            points: sizes in powers of two, `(points, dims)`.
            seconds: what the cost model says of each.
        """

    @abstractmethod
    def transfer_link(self, crosses_hosts: bool) -> Link | None:
        """Measured link of transfers between stages of a pipeline: of a device in its host, or of a
        host to the others; None if it was not measured.
        """
