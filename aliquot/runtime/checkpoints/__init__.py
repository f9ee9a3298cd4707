"""Checkpoints on disk: what they say of themselves, their arrays, and Orbax, which writes them.

Nothing here imports Orbax before `load_orbax` is called.
"""

from ._checksums import damage as damage
from ._describe import describe_checkpoints as describe_checkpoints
from ._leaves import Leaf as Leaf
from ._leaves import Target as Target
from ._leaves import chunk_shape as chunk_shape
from ._leaves import leaf_of as leaf_of
from ._load import load_orbax as load_orbax
from ._load import require_orbax as require_orbax
from ._record import FORMAT as FORMAT
from ._record import FORMAT_WITHOUT_CHECKSUMS as FORMAT_WITHOUT_CHECKSUMS
from ._record import NewerError as NewerError
from ._record import Record as Record
from ._record import SavedArray as SavedArray
from ._record import as_json as as_json
from ._record import differences as differences
from ._record import known as known
from ._record import numbers as numbers
from ._record import read_record as read_record
from ._record import reason as reason
from ._record import unfinished as unfinished
from ._writer import BusyError as BusyError
from ._writer import lock_folder as lock_folder
from ._writer import unlock_folder as unlock_folder
