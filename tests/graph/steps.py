"""Training steps as people write them, small: the table `STEPS` that capture, replay and planning
are tested on.

Each entry makes a fresh `Step` with real arrays, because a step that changes objects in place uses
its arguments up; `shapes(args)` gives the same arguments without arrays.
"""

from graph import (
    steps_frameworks,
    steps_loops,
    steps_models,
    steps_optax,
    steps_plain,
    steps_primitives,
    steps_variants,
)
from graph.step_base import STEPS as STEPS
from graph.step_base import Step as Step
from graph.step_base import shapes as shapes

FILES = (
    steps_frameworks,
    steps_loops,
    steps_models,
    steps_optax,
    steps_plain,
    steps_primitives,
    steps_variants,
)
