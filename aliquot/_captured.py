"""Steps that were captured to be planned, for whoever runs or prices them under that plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from .graph import Graph, capture, trace_settings
from .plans import Plan

# By plan, with the settings of JAX under which each was traced. A plan that is dropped takes its
# step with it.
_captured: WeakKeyDictionary[Plan, tuple[Graph, Mapping[str, Any]]] = WeakKeyDictionary()


def remember_captured(plan: Plan, graph: Graph) -> None:
    """Keep the step that a plan was made for."""
    _captured[plan] = graph, trace_settings()


def planned_for(plan: Plan, step: Callable[..., Any]) -> Graph | None:
    """The step that the plan was made for, if it was made in this process, for this function."""
    graph, _ = _captured.get(plan, (None, None))
    return graph if graph is not None and graph.calling.fn is step else None


def captured(
    plan: Plan, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Graph:
    """The captured step: the one that the plan was made for, if it is this step and JAX would trace
    this call of it alike. Like `jax.jit`, it then does not see what its function reads besides its
    arguments, such as a global variable, change. Raises as `capture` does.
    """
    graph, settings = _captured.get(plan, (None, None))
    if (
        graph is not None
        and graph.calling.fn is step
        and settings == trace_settings()
        and graph.calling.is_traced_alike(args, kwargs)
    ):
        return graph
    return capture(step, *args, **kwargs)
