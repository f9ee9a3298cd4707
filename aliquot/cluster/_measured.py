"""Corrections of the cost model's seconds by measurements of devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ._cluster import Link


MEASURED, MEASURED_COMPUTE = "measured", "measured-compute"
"""Grades of measurements: with all devices running together; or only of the compute of one device,
running alone.
"""


class Corrections(NamedTuple):
    """For each of some points: the ratio of measured to modelled seconds, whether it rests on a
    measurement nearby, and its relative error.

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
            points: sizes on a scale of logarithms to base 2, `(points, dims)`.
            seconds: the cost model's time of each point.
        """

    @abstractmethod
    def transfer_link(self, crosses_hosts: bool) -> Link | None:
        """Measured link of transfers between stages of a pipeline: of a device in its host, or of a
        host to the others; None if it was not measured.
        """
