"""A step as stages: its programs, the instructions of each submesh, and their issue to devices."""

from ._compile import CompiledPipeline as CompiledPipeline
from ._compile import compile_pipeline as compile_pipeline
from ._pipeline import Pipeline as Pipeline
from ._pipeline_stats import pipeline_stats as pipeline_stats
from ._plan_pipeline import build_plan_pipeline as build_plan_pipeline
from ._plan_pipeline import require_devices as require_devices
from ._stage_export import StageExport as StageExport
from ._stage_export import abstract_pipeline as abstract_pipeline
from ._stage_export import export_stages as export_stages
from ._stage_export import exported_memory as exported_memory
from ._stage_forms import Known as Known
from ._stage_forms import donated_values as donated_values
from ._stage_forms import form_of as form_of
from ._stage_forms import given_slots as given_slots
from ._stage_memory import StageMemory as StageMemory
from ._trace import Span as Span
from ._trace import measured_trace as measured_trace
