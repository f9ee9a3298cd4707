"""Arrays between devices and processes: their pieces, routes and moves, and the hosts that agree
and watch each other.
"""

from ...core import make_secret as make_secret
from ._agreement import Rendezvous as Rendezvous
from ._agreement import exchange as exchange
from ._agreement import spans_processes as spans_processes
from ._arrays import from_host as from_host
from ._arrays import is_key as is_key
from ._arrays import keys_from as keys_from
from ._arrays import struct as struct
from ._arrays import stub as stub
from ._arrays import words as words
from ._arrays import words_of as words_of
from ._calls import Call as Call
from ._comparison import agree_on_arrays as agree_on_arrays
from ._comparison import agree_on_init as agree_on_init
from ._comparison import agree_on_step as agree_on_step
from ._comparison import report as report
from ._describe import describe as describe
from ._endings import end_in_order as end_in_order
from ._given import Given as Given
from ._hosts import initialize as initialize
from ._hosts import shutdown as shutdown
from ._own_block import Block as Block
from ._own_block import devices_by_block as devices_by_block
from ._own_block import own_block as own_block
from ._own_block import slices_in as slices_in
from ._pieces import PiecedArray as PiecedArray
from ._pieces import Rows as Rows
from ._pieces import cut_leaves as cut_leaves
from ._pieces import input_pieces as input_pieces
from ._pieces import join_results as join_results
from ._pieces import joined as joined
from ._pieces import original_of as original_of
from ._pieces import output_pieces as output_pieces
from ._pieces import places_of as places_of
from ._state import gather as gather
from ._state import local_part as local_part
from ._state import place as place
from ._transfer import Move as Move
from ._transfer import channels_of_hosts as channels_of_hosts
from ._transfer import plan_broadcast as plan_broadcast
from ._transfer import plan_move as plan_move
from ._transfer import processes_of as processes_of
from ._watchdog import Peers as Peers
from ._watchdog import watched as watched
