"""Floor 7: verification of plans by the compiler that will run them, without its devices."""

from ._cache import default_cache as default_cache
from ._choose import compiled_figures as compiled_figures
from ._choose import first_that_fits as first_that_fits
from ._compare import CollectiveComparison as CollectiveComparison
from ._compare import UnintendedCollective as UnintendedCollective
from ._compare import compare_collectives as compare_collectives
from ._compare import unintended_collectives as unintended_collectives
from ._compile import CompiledProgram as CompiledProgram
from ._compile import Compiler as Compiler
from ._plan import verify_plan as verify_plan
from ._process import CompileError as CompileError
from ._program import PortableProgram as PortableProgram
from ._program import portable_program as portable_program
from ._program import portable_stage as portable_stage
from ._targets import GPU_DESCRIPTIONS as GPU_DESCRIPTIONS
from ._targets import TPU_DIMS as TPU_DIMS
from ._targets import CompileTarget as CompileTarget
from ._targets import GPUDescription as GPUDescription
from ._targets import resolve_target as resolve_target
from ._text import compiled_collectives as compiled_collectives
from ._verify import StageVerification as StageVerification
from ._verify import Verification as Verification
from ._wheels import CompilerMissingError as CompilerMissingError
from ._wheels import require_compiler as require_compiler
