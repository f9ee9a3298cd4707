"""Measurement of programs on devices: each distinct program is measured once, and the results are
kept in a database.
"""

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
from ._database import check_database as check_database
from ._describe import describe_blocks as describe_blocks
from ._describe_profiles import describe_profiles as describe_profiles
from ._describe_profiles import measured_curves as measured_curves
from ._fit import Fit as Fit
from ._fit import fit_profiles as fit_profiles
from ._fit import to_toml as to_toml
from ._measured import fitting_rows as fitting_rows
from ._measured import is_measured as is_measured
from ._measured import read_measured as read_measured
from ._operators import LAUNCH as LAUNCH
from ._operators import Operator as Operator
from ._operators import compile_operator as compile_operator
from ._operators import operator_key as operator_key
from ._programs import CompiledPart as CompiledPart
from ._programs import compile_part as compile_part
from ._programs import device_key as device_key
from ._programs import measure_in_turn as measure_in_turn
from ._programs import program_key as program_key
from ._required import alone_on_one_device as alone_on_one_device
from ._required import operators_of_plan as operators_of_plan
from ._required import required_operators as required_operators
from ._run import ProfileRun as ProfileRun
from ._run import measured_step as measured_step
from ._run import priced_combinations as priced_combinations
from ._run import profile_operators as profile_operators
from ._run import profile_segments as profile_segments
from ._segments import Combination as Combination
from ._segments import SegmentedStep as SegmentedStep
from ._segments import SegmentKind as SegmentKind
from ._segments import segment_step as segment_step
from ._timing import Timing as Timing
from ._timing import time_part as time_part
