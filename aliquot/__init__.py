"""Automatic parallelism for ordinary JAX training steps.

Public names are imported on first use (PEP 562), so that `import aliquot` and the command line's
help stay free of JAX. The table below is the only list of them; `__init__.pyi` repeats it for type
checkers and editors.
"""

import importlib
import sys

_MODULE_OF = {
    "capture": "_api",
    "constrain": "_api",
    "estimate": "_api",
    "explain": "_api",
    "plan": "_api",
    "plan_fastest": "_variants",
    "parallelize": "_api",
    "verify": "_api",
    "compare": "_questions",
    "largest_batch": "_questions",
    "size": "_size",
    "find_remedies": "_remedies",
    "read": "_reading",
    "export": "_reading",
    "evaluator": "_evaluation",
    "MetricsLog": "report",
    "Cluster": "cluster",
    "Plan": "plans",
    "DataParallel": "planners",
    "Zero2Parallel": "planners",
    "Zero3Parallel": "planners",
    "ManualParallel": "planners",
    "TensorParallel": "planners",
    "Megatron": "planners",
    "ShardParallel": "planners",
    "PipeshardParallel": "planners",
    "StageDP": "planners",
    "Bottleneck": "planners",
    "Grid": "planners",
    "ManualStages": "planners",
    "Auto": "planners",
    "WholeProgram": "planners",
    "Blocks": "planners",
    "ILP": "planners",
    "Fixed": "planners",
    "Within": "planners",
    "plan_chain": "planners",
    "AliquotError": "core",
    "CaptureError": "core",
    "ClusterError": "core",
    "InfeasibleError": "core",
    "InputError": "core",
    "LossyExportError": "core",
    "MissingExtraError": "core",
    "MissingRuleError": "core",
    "PlanFileError": "core",
    "PlanMismatchError": "core",
    "TimeLimitError": "core",
    "Checkpoints": "runtime",
    "experts": "graph",
    "register_dim_rule": "sharding",
    "LaunchError": "launching",
    "launch": "launching",
}
_FOLDERS = (
    "cluster",
    "core",
    "cost",
    "data",
    "graph",
    "planners",
    "plans",
    "runtime",
    "sharding",
    "torch",
    "zoo",
)

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name):
    if name == "__version__":
        from .core import version_of

        value = version_of("aliquot")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    elif name in _FOLDERS:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise _missing(name)
    globals()[name] = value
    return value


def _missing(name):
    """The error for a name that is not of this package, with what to write for one of Alpa's."""
    from .core import NAMES_ELSEWHERE

    absent = f"module {__name__!r} has no attribute {name!r}"
    if name not in NAMES_ELSEWHERE:
        return AttributeError(absent)
    message = f"{absent}, which Alpa has. {NAMES_ELSEWHERE[name]}"
    # Of `from aliquot import name` Python asks first whether the name is there. An AttributeError
    # would be taken for a no, and Python's own message would hide this one.
    if sys._getframe(2).f_code.co_name == "_handle_fromlist":
        return ImportError(message, name=name)
    return AttributeError(message)


def __dir__():
    return sorted({*globals(), *__all__, *_FOLDERS})
