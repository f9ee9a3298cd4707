"""Every primitive that the installed JAX defines has a rule, is opened when a step is captured, is
inferred, or is listed here.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import numpy as np
import pytest
from jax.extend.core import Primitive

from aliquot.graph import _jax_compat as compat
from aliquot.graph import capture
from aliquot.sharding import dim_rule, registered_primitives

# What a step can contain is what JAX's own modules define, not what other tests have imported.
DEFINED = """
import gc, json
import jax, jax.numpy, jax.random, jax.scipy
from jax.extend.core import Primitive
print(json.dumps(sorted({p.name for p in gc.get_objects() if isinstance(p, Primitive)})))
"""
OPENED = (
    {"scan", "while", "cond", "custom_linear_solve", "name"}
    | compat._INLINED_CALLS
    | compat._HIGH_LEVEL
    | compat._PLACEMENTS
    | compat._REMAT_NAMES
)
INTS, WORDS = np.arange(64, dtype=np.int32), np.arange(64, dtype=np.uint32)
INFERRED = {
    "mulhi": ("a,a->a", (INTS, INTS)),
    "philox2x32": ("a,a,a->a,a", (WORDS,) * 3),
    "philox4x32": ("a,a,a,a,a,a->a,a,a,a", (WORDS,) * 6),
    "threefry4x32": ("a,a,a,a,a,a,a,a->a,a,a,a", (WORDS,) * 8),
}
RUNS_WHOLE = {
    "stands inside shard_map or pmap alone, which stay closed": (
        "all_gather all_gather_done all_gather_invariant all_gather_reduced"
        " all_gather_reduced_start all_gather_start all_to_all all_to_all_done all_to_all_start"
        " axis_index pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start ppermute"
        " ppermute_done ppermute_start precv preduced psend psum_done psum_invariant"
        " psum_invariant_start psum_start pvary ragged_all_to_all reduce_scatter"
        " reduce_scatter_done reduce_scatter_start reduced_vary_cast reduced_vary_cast_p"
        " unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start"
        " unreduced_reduce_scatter unreduced_reduce_scatter_start vary_unreduced_cast"
        " vary_unreduced_cast_p"
    ),
    "reads or writes through a reference, which is an effect": (
        "accum_grad_in_ref addupdate box_get box_set core_map create_linear empty_ref free_ref"
        " freeze get log_extend log_read new_box new_log new_ref pin run_state stage swap unpin"
    ),
    "has an effect, or exists for one": (
        "check dce_sink inspect_sharding shape_assertion unreachable"
    ),
    "stands in steps of unknown shapes alone, which are not captured": (
        "dim_as_value dimension_size"
    ),
    "exists while JAX differentiates or lowers a function, not in what it traces": (
        "from_edtype to_edtype zeros_like"
    ),
    "holds a function traced for one size": (
        "call custom_jvp_call_jaxpr remat_opt select_and_scatter"
    ),
    "has its result's shape in a parameter": "broadcast_to iota_2x32_shape",
    "cuDNN alone runs it": (
        "cudnn_fusion dot_product_attention_bwd dot_product_attention_fp8_bwd"
        " dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd"
        " dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd scaled_dot scaled_matmul"
        " scaled_matmul_wrapper"
    ),
    "says where an array is, with a parameter for each device": "with_memory_space_constraint",
}


def test_every_primitive_of_jax_is_accounted_for():
    text = subprocess.run(
        [sys.executable, "-c", DEFINED], check=True, capture_output=True, text=True
    ).stdout
    listed = {name for names in RUNS_WHOLE.values() for name in names.split()}
    unknown = set(json.loads(text)) - registered_primitives() - OPENED - INFERRED.keys() - listed
    assert not unknown, (
        "declare a rule, show that one is inferred, or say here why the operator runs whole"
    )


@pytest.mark.parametrize("name", INFERRED)
def test_primitives_without_a_declared_rule_are_inferred(name):
    text, args = INFERRED[name]
    (primitive,) = {p for p in gc.get_objects() if isinstance(p, Primitive) and p.name == name}
    graph = capture(primitive.bind, *args)
    assert [dim_rule(op, graph).text for op in graph.ops] == [text]
