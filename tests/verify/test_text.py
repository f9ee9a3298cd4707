"""Compiled text: groups of devices in the compiler's own words, causes of collectives, a TPU's
cycles.
"""

import pytest

from aliquot.verification._text import (
    compiled_collectives,
    estimated_cycles,
    modelled_compute_s,
    unpriced_calls,
)

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


def test_the_compute_of_a_gpu_is_what_its_kernels_are_expected_to_take():
    """Of several figures that of the model of indices counts, then that of measured products;
    collectives and calls of cuDNN are left out.
    """

    def costs(**named: float) -> str:
        listed = ",".join(
            f'{{"end_to_end_cycles":1.5,"exec_time_us":{us},"name":"{name}"}}'
            for name, us in named.items()
        )
        return f'backend_config={{"queue":"0","reification_cost":[{listed}],"device":"X"}}'

    exact = costs(**{"": 90, "sol": 80, "indexing-cost-model": 7})
    text = f"""%fused (q: f32[8]) -> f32[8] {{
  %inner = f32[8]{{0}} add(%q, %q), {costs(sol=1000)}
}}

%body (p: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} fusion(%p), calls=%fused, {exact}
  %c = f32[8]{{0}} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax", {costs()}
  %g = f32[8]{{0}} all-reduce-start(%a), {costs(sol=500)}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %b = f32[8]{{0}} custom-call(%p), custom_call_target="__cublas$gemm", {costs(**{"": 9, "sol": 3})}
  %d = f32[8]{{0}} copy(%p), {costs(**{"": 2})}
  %w = f32[8]{{0}} while(%b), body=%body, backend_config={{"known_trip_count":{{"n":"4"}}}}
}}
"""
    assert modelled_compute_s(text) == pytest.approx((4 * 7 + 3 + 2) * 1e-6)
    assert unpriced_calls(text) == 4
