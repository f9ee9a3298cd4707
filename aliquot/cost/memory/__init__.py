"""Memory: stored arrays, their live ranges, and their bytes on each device."""

from ._curve import memory_over_time as memory_over_time
from ._deferred import may_take_turns as may_take_turns
from ._deferred import takes_turns as takes_turns
from ._held import Held as Held
from ._held import held_arrays as held_arrays
from ._held import made_arrays as made_arrays
from ._host import CopySpan as CopySpan
from ._host import copy_spans as copy_spans
from ._host import is_on_host as is_on_host
from ._model import Conversion as Conversion
from ._model import MemoryModel as MemoryModel
from ._model import MemoryUse as MemoryUse
from ._model import alive_over_time as alive_over_time
from ._model import least_timeline as least_timeline
from ._model import memory_model as memory_model
from ._model import residents_model as residents_model
from ._residents import CATEGORY_OF_ROLE as CATEGORY_OF_ROLE
from ._residents import Resident as Resident
from ._residents import residents as residents
from ._storage import Storage as Storage
from ._storage import find_storage as find_storage
from ._storage import stored_by_fusion as stored_by_fusion
