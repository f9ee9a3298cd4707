"""Measure programs where there is hardware, once for each distinct one, and keep what was measured."""

from ._compose import Composed as Composed
from ._compose import MeasuredStep as MeasuredStep
from ._compose import compose as compose
from ._conversions import Conversion as Conversion
from ._conversions import all_conversions as all_conversions
from ._conversions import compile_conversion as compile_conversion
from ._conversions import conversions_between as conversions_between
from ._database import Measurement as Measurement
from ._database import ProfileDatabase as ProfileDatabase
from ._database import ProgramKey as ProgramKey
from ._describe import describe_blocks as describe_blocks
from ._programs import CompiledPart as CompiledPart
from ._programs import compile_part as compile_part
from ._programs import measure_in_turn as measure_in_turn
from ._programs import program_key as program_key
from ._programs import time_part as time_part
from ._run import ProfileRun as ProfileRun
from ._run import measured_step as measured_step
from ._run import priced_combinations as priced_combinations
from ._run import profile_segments as profile_segments
from ._segments import Combination as Combination
from ._segments import SegmentedStep as SegmentedStep
from ._segments import SegmentKind as SegmentKind
from ._segments import segment_step as segment_step
