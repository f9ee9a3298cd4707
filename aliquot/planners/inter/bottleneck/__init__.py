"""Relief of the bottleneck, Aceso's local search, over chains of any kind."""

from ._bottleneck import Bottleneck as Bottleneck
from ._moves import Candidate as Candidate
from ._moves import Neighbours as Neighbours
from ._moves import Variant as Variant
from ._moves import with_moved as with_moved
from ._relief import Relief as Relief
from ._relief import Score as Score
