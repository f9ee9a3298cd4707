"""Intra planners: they split each operator of a step, or of a stage, on one mesh."""

from ._base import AbstractIntra as AbstractIntra
from ._base import AbstractSearch as AbstractSearch
from ._base import IntraCosts as IntraCosts
from ._base import IntraSolution as IntraSolution
from ._base import NotSearched as NotSearched
from ._base import Space as Space
from ._base import TooLarge as TooLarge
from ._base import judge_picks as judge_picks
from ._within import Restricted as Restricted
from ._within import Within as Within
from .blocks import BlockOptions as BlockOptions
from .blocks import Blocks as Blocks
from .blocks import as_one_block as as_one_block
from .blocks import block_options as block_options
from .blocks import restrict_blocks as restrict_blocks
from .fixed import ATTENTION_WAYS as ATTENTION_WAYS
from .fixed import Fixed as Fixed
from .fixed import MegatronSplit as MegatronSplit
from .fixed import kinds_of as kinds_of
from .ilp import ILP as ILP
