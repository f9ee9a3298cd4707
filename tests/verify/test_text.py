"""Compiled text: groups of devices in the compiler's own words, causes of collectives, a TPU's
cycles.
"""

import pytest

from aliquot.verification._text import compiled_collectives, estimated_cycles

TABLES = """HloModule step, is_scheduled=true

FileNames
1 "train.py"
2 "/site-packages/flax/nnx/linear.py"
3 "/site-packages/aliquot/runtime/_lowering.py"

FunctionNames
1 "Block.__call__"
2 "Linear.__call__"
3 "constrain"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=400 end_line=400 column=1 end_column=2}
3 {file_name_id=3 function_name_id=3 line=70 end_line=70 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}

"""


def label(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    text = f"{TABLES}ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    (found,) = compiled_collectives(text, ("x", "y"), (2, 2))
    assert found.axes == ("x",)
    return found.label


GROUPS = "replica_groups={{0,2},{1,3}}"
MADE = (
    '%d = f32[4]{0} dot(%p), metadata={op_name="jit(run)/transpose(jvp())/dot_general"'
    " stack_frame_id=2}"
)
MARKED = (
    f'%g = f32[8]{{0}} all-gather(%d), {GROUPS}, metadata={{op_name="jit(run)/sharding_constraint"'
    " stack_frame_id=3}"
)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((MADE, MARKED), "dot_general in the backward pass at train.py:12 (Block.__call__)"),
        (
            (MADE, f"%g = (f32[8]{{0}}, f32[8]{{0}}) all-reduce(%d, %p), {GROUPS}, to_apply=%add"),
            "dot_general in the backward pass at train.py:12 (Block.__call__), and 1 more",
        ),
        (("%d = f32[4]{0} parameter(3)", MARKED), "input 3"),
        (('%d = f32[4]{0} iota(), metadata={op_name="jit(run)/iota"}', MARKED), "iota"),
        (("%d = f32[4]{0} copy(%unknown)", MARKED), ""),
    ],
)
def test_the_cause_is_the_operator_that_makes_what_moves(lines, expected):
    assert label(*lines) == expected


def test_loops_count_by_their_trips():
    text = """%body (p: f32[8]) -> f32[8] {
  %a = f32[8]{0} fusion(%p), backend_config={"estimated_cycles":"10"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %b = f32[8]{0} fusion(%p), backend_config={"estimated_cycles":"5"}
  %w = f32[8]{0} while(%b), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"4"}}
}
"""
    assert estimated_cycles(text) == 45
