"""Plans whose memory is compared with what compilers report: combinations of model, method, mesh,
recomputation, micro-batches, number type, size and device.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from _results import say

from aliquot.cluster import DEVICES

FACTORS: dict[str, tuple[Any, ...]] = {
    "family": ("gpt", "llama"),
    "scan": (False, True),
    "method": ("dp", "zero2", "zero3", "shard", "auto"),
    "mesh": ("8", "4x2", "2x4"),
    "recompute": ("none", "block"),
    "micro_batches": (1, 4),
    "dtype": ("bf16", "float32"),
    "size": ("125m", "350m", "1.3b", "2.6b", "7b"),
    "gpu": ("H100", "A100-40GB"),
}
TPUS = ("v5e", "v5p")
SEEDS_OF_REAL_SIZES = {"seen": 11, "reported": 12}
"""Draws of models at real size: the one in sight while the model found its form, and another."""
CLUSTERS = {"v5e": "v5e-8", "v5p": "v5p-16"}
"""What eight devices are called, where that is more than their number."""
# Layers, width, heads, and the sequences and tokens of a batch: a batch of 4 micro-batches still
# splits over 8 GPUs.
SIZES = {
    "125m": (12, 768, 12, 32, 1024),
    "350m": (24, 1024, 16, 32, 512),
    "1.3b": (24, 2048, 32, 32, 512),
    "2.6b": (32, 2560, 32, 32, 256),
    "7b": (32, 4096, 32, 32, 256),
}


# Models of the zoo at the size at which people train them. `seq_len` and `per_device` are tokens of
# a sequence, and tokens (images) of a micro-batch on each device.
REAL_SIZES: dict[str, tuple[Any, ...]] = {
    "model": (
        "gpt-1.3b",
        "gpt-2.6b",
        "llama-7b",
        "llama-13b",
        "moe-1.3b",
        "moe-7.1b",
        "wide-resnet-1b",
        "wide-resnet-2b",
    ),
    "scan": (False, True),
    "method": ("dp", "zero2", "zero3", "shard", "auto", "tp:8"),
    "recompute": ("none", "block"),
    "micro_batches": (1, 4),
    "seq_len": (1024, 4096),
    "per_device": (4096, 16384),
    "gpu": ("H100", "A100-80GB", "V100-16GB"),
}


def real_cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Combinations of `REAL_SIZES`, the models in turn; at most four times `count`, as many turn
    out too large.

    For images, sequences, loops over layers and tensor parallelism mean nothing, and batch
    normalization needs the whole batch.
    """
    found: dict[str, dict[str, Any]] = {}
    for drawn in draw(4 * count, REAL_SIZES, seed=seed):
        case = dict(drawn)
        if case["model"].startswith("wide-resnet"):
            case |= {"scan": False, "seq_len": 0, "per_device": case["per_device"] // 256}
            case |= {"micro_batches": 1}
            case |= {"method": "zero2"} if case["method"] == "tp:8" else {}
        found.setdefault(repr(case), case)
    by_model = [[c for c in found.values() if c["model"] == m] for m in REAL_SIZES["model"]]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_model))
    return [case for case in in_turn if case is not None]


# Model, loop over layers, method, recomputation, sequence length (0: images) and GPU of steps whose
# largest batch is asked for.
_NEAR_THE_LIMIT = (
    ("gpt-1.3b", True, "zero2", "block", 4096, "H100"),
    ("gpt-2.6b", False, "zero3", "none", 1024, "A100-40GB"),
    ("llama-7b", True, "zero3", "block", 4096, "H100"),
    ("llama-7b", False, "zero3", "block", 1024, "A100-80GB"),
    ("llama-13b", True, "zero3", "block", 4096, "A100-80GB"),
    ("gpt-1.3b", False, "dp", "none", 1024, "H100"),
    ("gpt-6.7b", True, "tp:8", "block", 1024, "A100-40GB"),
    ("moe-1.3b", True, "zero3", "block", 4096, "H100"),
    ("wide-resnet-1b", False, "zero2", "none", 0, "H100"),
    ("wide-resnet-500m", False, "dp", "block", 0, "A100-40GB"),
)


def cases_near_the_limit() -> list[dict[str, Any]]:
    """Combinations without the tokens of a batch, which are to be as many as fit."""
    names = ("model", "scan", "method", "recompute", "seq_len", "gpu")
    return [{"micro_batches": 1} | dict(zip(names, c, strict=True)) for c in _NEAR_THE_LIMIT]


def draw(count: int, factors: dict[str, tuple[Any, ...]], seed: int = 0) -> list[dict[str, Any]]:
    """Combinations such that any two choices that fit stand in one of them, while `count` allows;
    in random order.
    """
    rng = random.Random(seed)
    possible = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    possible = [case for case in possible if state_fits(case)]
    missing = set().union(*map(_pairs, possible))
    found: list[dict[str, Any]] = []
    while len(found) < count:
        best = max(rng.sample(possible, 60), key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        found.append(best)
    if missing:
        say(f"{len(missing)} pairs do not occur in {count} combinations")
    rng.shuffle(found)
    return found


def _pairs(case: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(case.items(), 2))


def state_fits(case: dict[str, Any]) -> bool:
    """Whether parameters, moments and gradients leave room: compilers change programs that exceed
    the memory.
    """
    if "model" in case:
        parameters = 1e9 * float(case["model"].rpartition("-")[2].removesuffix("b"))
    else:
        layers, width, *_ = SIZES[case["size"]]
        parameters = 12 * layers * width**2 + 51200 * width
    bytes_each = {"dp": 16.0, "zero2": 4 + 8 / 8 + 4}.get(case["method"], 4.0)
    return bytes_each * parameters < 0.6 * DEVICES[case["gpu"]].memory_bytes


def cluster_of(case: dict[str, Any]) -> str:
    """The cluster of a combination, as `Cluster.preset` takes it."""
    return CLUSTERS.get(case["gpu"], f"8x{case['gpu']}")


def workload_of(case: dict[str, Any]) -> Any:
    """The training step of a combination."""
    from aliquot import zoo

    if "model" in case:
        each = case["per_device"] // (case["seq_len"] or 1)
        return zoo.build(
            case["model"],
            max(1, 8 * each) * case["micro_batches"],
            overrides={"seq_len": case["seq_len"]} if case["seq_len"] else None,
            dtype=_dtype_of(case),
            recompute=case["recompute"],
            scan=case["scan"],
            device=DEVICES[case["gpu"]],
        )
    layers, width, heads, sequences, tokens = SIZES[case["size"]]
    base = {"gpt": "gpt-1.3b", "llama": "llama-7b"}[case["family"]]
    config = zoo.configure(
        base, num_layers=layers, hidden_size=width, num_heads=heads, seq_len=tokens
    )
    return zoo.build(
        config, sequences, dtype=case["dtype"], recompute=case["recompute"], scan=case["scan"]
    )


def _dtype_of(case: dict[str, Any]) -> str:
    """What a GPU multiplies fastest. Wide-ResNets were trained in float32 on V100, and XLA gathers
    gradients of maxima over windows in float16.
    """
    if not case["gpu"].startswith("V100"):
        return "bf16"
    return "float32" if case["model"].startswith("wide") else "float16"


def method_of(case: dict[str, Any]) -> Any:
    """The planner of a combination."""
    from aliquot.planners import (
        Auto,
        DataParallel,
        Megatron,
        ShardParallel,
        Zero2Parallel,
        Zero3Parallel,
    )

    mesh = tuple(map(int, case["mesh"].split("x"))) if "mesh" in case else None
    fixed: dict[str, Any] = {"dp": DataParallel, "zero2": Zero2Parallel, "zero3": Zero3Parallel}
    if case["method"] in fixed:
        return fixed[case["method"]]()
    if case["method"] == "tp:8":
        return Megatron(tensor=8)
    return {"shard": ShardParallel, "auto": Auto}[case["method"]](mesh_shape=mesh)
