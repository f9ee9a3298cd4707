"""Floor 1: errors, units and safe files. Imports nothing else of this package, and no jax."""

from ._errors import AliquotError as AliquotError
from ._errors import CaptureError as CaptureError
from ._errors import ClusterError as ClusterError
from ._errors import InfeasibleError as InfeasibleError
from ._errors import InputError as InputError
from ._errors import MissingExtraError as MissingExtraError
from ._errors import MissingRuleError as MissingRuleError
from ._errors import PlanFileError as PlanFileError
from ._errors import PlanMismatchError as PlanMismatchError
from ._errors import nearest as nearest
from ._files import write_atomic as write_atomic
from ._garbage import collect_seldom as collect_seldom
from ._garbage import collecting_seldom as collecting_seldom
from ._units import format_bytes as format_bytes
from ._units import format_bytes_per_s as format_bytes_per_s
from ._units import format_count as format_count
from ._units import format_flops as format_flops
from ._units import format_flops_per_s as format_flops_per_s
from ._units import format_seconds as format_seconds
from ._units import parse_bytes as parse_bytes
from ._units import parse_flops_per_s as parse_flops_per_s
from ._units import parse_rate as parse_rate
from ._units import parse_seconds as parse_seconds
from ._xla_flags import known_xla_flags as known_xla_flags
from ._xla_flags import with_xla_flags as with_xla_flags
