"""Splits by ParallelBlocks: one decision for all products through which a split passes."""

from ._blocks import BlockOptions as BlockOptions
from ._blocks import Blocks as Blocks
from ._blocks import as_one_block as as_one_block
from ._blocks import block_options as block_options
from ._blocks import blocks_split_apart as blocks_split_apart
from ._blocks import restrict_blocks as restrict_blocks
