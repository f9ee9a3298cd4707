"""Floor 2: what a plan runs on. Never imports jax by itself; only `Cluster.detect` does, when
called.
"""

from ._attention import Attention as Attention
from ._attention import attention_of as attention_of
from ._calibration import Products as Products
from ._calibration import chip_of as chip_of
from ._calibration import is_calibrated as is_calibrated
from ._cluster import MOST_DEVICES as MOST_DEVICES
from ._cluster import Cluster as Cluster
from ._cluster import Host as Host
from ._cluster import Link as Link
from ._detect import catalogue_name as catalogue_name
from ._detect import num_hosts as num_hosts
from ._detect import visible_devices as visible_devices
from ._device import CALIBRATED as CALIBRATED
from ._device import DEVICES as DEVICES
from ._device import Device as Device
from ._file import parse_toml as parse_toml
from ._logical import AXIS_NAMES as AXIS_NAMES
from ._logical import AxisLink as AxisLink
from ._logical import LogicalMesh as LogicalMesh
from ._logical import logical_mesh_shapes as logical_mesh_shapes
from ._measured import MEASURED as MEASURED
from ._measured import MEASURED_COMPUTE as MEASURED_COMPUTE
from ._measured import AbstractMeasured as AbstractMeasured
from ._measured import Corrections as Corrections
from ._presets import wire as wire
from ._prices import SAMPLE_PRICES as SAMPLE_PRICES
from ._prices import HostPrice as HostPrice
from ._prices import load_prices as load_prices
from ._reported import ReportedSteps as ReportedSteps
from ._reported import figures_digest as figures_digest
from ._reported import most_error as most_error
from ._reported import recorded_digests as recorded_digests
from ._reported import reported_steps as reported_steps
from ._reported import said_of_data_sheet as said_of_data_sheet
from ._reported import said_of_reported as said_of_reported
from ._reported import steps_reported_by as steps_reported_by
from ._reported import usual_error as usual_error
from ._reported import write_reported_steps as write_reported_steps
from ._subcluster import subcluster as subcluster
from ._target import TARGETS as TARGETS
from ._target import SumCollective as SumCollective
from ._target import Target as Target
from ._target import target_for as target_for
