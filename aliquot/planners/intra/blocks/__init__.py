"""Splits by ParallelBlocks: one decision for all products through which a split passes."""

from ._blocks import Blocks as Blocks
from ._options import BlockOptions as BlockOptions
from ._options import as_one_block as as_one_block
from ._options import block_options as block_options
from ._options import blocks_split_apart as blocks_split_apart
from ._options import restrict_blocks as restrict_blocks
