"""A small database and configuration in Aceso's formats, with numbers that are easy to add up."""

from __future__ import annotations

import json
from pathlib import Path

HEADER = (
    "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,"
    "fwd_reserved,bwd_reserved"
)
CHAIN = """
resharding = true
copies_of_weights = 8
layer_starts = ["norm"]
layout = ["tp", "dp", "1", "1"]

[[groups]]
operators = ["embed"]

[[groups]]
repeat = "num_layers"
operators = ["norm", "mix"]

[layouts]
mix = [[["1", "dp", "tp", "1"], ["tp", "dp", "1", "1"]]]
"""
# Forward and backward in microseconds, then MiB; a tensor degree of 2 halves all but what enters
# and leaves.
ROWS = {
    "embed": (100, 200, 1, 8, 10, 4, 2, 4),
    "norm": (10, 20, 8, 8, 0, 6, 0, 8),
    "mix": (300, 600, 8, 8, 20, 12, 6, 16),
}


def write_database(folder: Path) -> Path:
    """Micro-batches 1 and 2, tensor degrees 1 and 2, one algorithm."""
    folder.mkdir()
    for mbs in (1, 2):
        for tp in (1, 2):
            lines = [HEADER]
            for name, (forward, backward, *sizes) in ROWS.items():
                scale = mbs / tp
                kept = [
                    sizes[0] * mbs,
                    sizes[1] * mbs,
                    sizes[2] / tp,
                    *(x * scale for x in sizes[3:]),
                ]
                lines.append(
                    ",".join(
                        [name, *(f"{x:.3f}" for x in (forward * scale, backward * scale, *kept))]
                    )
                )
            (folder / f"toy_1B_mbs{mbs}_tp{tp}_algo0.csv").write_text("\n".join(lines) + "\n")
    (folder / "p2p_intra_node.csv").write_text("1,2,4,8,16\n1, 2, 4, 8, 16\n")
    (folder / "prim_toy_1B_all_gather_2gpus.csv").write_text(
        "data_size(MB),time(ms)\n8,0.5\n16,0.9\n"
    )
    return folder


def write_chain(path: Path) -> Path:
    path.write_text(CHAIN)
    return path


def write_toy_configuration(path: Path, **changes: object) -> Path:
    """Two stages of an embedding and two layers: (embed, norm, mix) on two GPUs by tensors, (norm,
    mix) on one.
    """
    content = {
        "model_name": "toy",
        "model_size": "1B",
        "num_layers": 2,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "num_stages": 2,
        "num_gpus": [2, 1],
        "checkpoint_activations": [False, True],
        "resharding_stages": [False, False],
        "num_ops_in_each_stage": [3, 2],
        "model_parallel_size_of_each_op": [[2, 2, 2], [1, 1]],
        "data_parallel_size_of_each_op": [[1, 1, 1], [1, 1]],
        "recompute_ops": [[0, 0, 0], [1, 1]],
        "algo_of_each_op": [[0, 0, 0], [0, 0]],
    }
    path.write_text(json.dumps(content | changes))
    return path
