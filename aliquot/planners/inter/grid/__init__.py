"""Regular grids, as experts set them by hand."""

from ._grid import GRID_SCHEDULE as GRID_SCHEDULE
from ._grid import EqualStages as EqualStages
from ._grid import Grid as Grid
from ._grid import layer_starts as layer_starts
from ._grid import layouts as layouts
from ._grid import nothing_fits as nothing_fits
