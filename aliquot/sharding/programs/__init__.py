"""The step cut over time and into stages: graphs of micro-batches, and programs of stages, without
devices.
"""

from ._casts import cast_once as cast_once
from ._casts import parameter_casts as parameter_casts
from ._crossing import Crossing as Crossing
from ._crossing import find_crossing as find_crossing
from ._crossing import find_early_updates as find_early_updates
from ._crossing import require_one_stage as require_one_stage
from ._layout import Layout as Layout
from ._layout import sizes_of as sizes_of
from ._micro_batch_graphs import MicroBatchGraphs as MicroBatchGraphs
from ._micro_batch_graphs import struct_of as struct_of
from ._micro_batch_graphs import subgraph as subgraph
from ._pipeline_cut import PipelineCut as PipelineCut
from ._pipeline_cut import TimeCut as TimeCut
from ._pipeline_cut import cut_graph as cut_graph
from ._pipeline_cut import cut_pipeline as cut_pipeline
from ._split_stages import Recompute as Recompute
from ._split_stages import split_stages as split_stages
from ._stage_programs import Part as Part
from ._stage_programs import StageProgram as StageProgram
from ._stage_programs import StagePrograms as StagePrograms
