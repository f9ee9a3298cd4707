"""Publicly reported training steps as steps of the zoo: the model, cluster, method and
recomputation of a row, or the reason why it cannot be expressed.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from aliquot.cluster import Cluster
from aliquot.core import InputError
from aliquot.planners import AbstractMethod, DataParallel, Megatron, Zero2Parallel, Zero3Parallel
from aliquot.zoo import MODELS, as_fields

DEVICES = {
    "A100-40GB": "A100-40GB",
    "A100-80GB": "A100-80GB",
    "B200": "B200",
    "B300": "B300",
    "GB200": "GB200",
    "GB300": "GB300",
    "H100": "H100",
    "H100-80GB-SXM": "H100",
    "H100-96GB-HBM2e-500W": "H100-96GB",
    "H200": "H200",
    "A100-80GB-SXM": "A100-80GB",
    "MI300X": "MI300X",
    "TPU v4": "v4",
    "trn1": "trn1",
    "TPU v5e": "v5e",
    "TPU v5p": "v5p",
    "TPU v6e": "v6e",
    "V100-16GB-SXM2": "V100-16GB",
}
# The words of a row before the first bracket, and what the zoo calls it.
_RECOMPUTE = {
    "none": "none",
    "no": "none",
    "full": "block",
    "block": "block",
    "remat_policy full": "block",
    "remat_policy minimal": "minimal",
    "remat_policy minimal_flash": "minimal",
    "selective op": "minimal",
    "selective layer": "block:2",
    "save_dot_with_context_except_mlp": "save_attention",
    "none at 8K": "none",
}
_NETWORKS_GBPS = {
    "1600 Gbps RoCE node to node": 1600.0,
    "Selene: 8 x 200 Gbps HDR InfiniBand per host": 1600.0,
    "400 Gb/s RDMA per GPU": 3200.0,
    "400 Gbps per GPU RoCE (Arista 7800) ": 3200.0,
}
_FITTED_DEVICES = 64
_OF_DEEPSEEK = (
    "num_dense_layers",
    "dense_ffn_size",
    "kv_rank",
    "query_rank",
    "head_size",
    "rope_head_size",
    "value_head_size",
    "gating",
    "routed_scale",
)
_CUBE_MESH_GBPS = 100.0
# Frameworks by the beginning of what a row calls them: what errors call them, and why their steps
# take another time than those of a JAX program; empty for JAX programs. The first that fits counts.
FRAMEWORKS = (
    ("MaxText", "MaxText", ""),
    ("EasyLM", "EasyLM", ""),
    ("ViT in T5X", "T5X", ""),
    ("T5X", "T5X", ""),
    ("llm-foundry", "PyTorch FSDP of 2023", "FlashAttention 2 and products of 2023, not compiled"),
    ("TinyLlama", "PyTorch FSDP of 2023", "FlashAttention 2 and products of 2023, not compiled"),
    ("nanotron", "nanotron", "FlashAttention 2 and PyTorch of 2024, not compiled"),
    ("torchtitan", "torchtitan", "compiled PyTorch of 2024 and 2025"),
    ("fms-fsdp", "fms-fsdp", "compiled PyTorch of 2024"),
    ("NeMo AutoModel", "NeMo AutoModel", "PyTorch with Transformer Engine and DeepEP"),
    ("NeMo", "NeMo", "Megatron-Core with Transformer Engine"),
    ("Megatron-Bridge", "Megatron-Bridge", "Megatron-Core with Transformer Engine"),
    ("Megatron-LM 23e00ed0", "Megatron-LM of 2026", "Transformer Engine"),
    (
        "Megatron-LM",
        "Megatron-LM of 2021 and 2022",
        "operators launched one by one, communication not overlapped with compute",
    ),
    (
        "DeepSpeed",
        "DeepSpeed of 2021",
        "operators launched one by one, communication not overlapped with compute",
    ),
    ("OneFlow", "OneFlow", "operators one by one"),
    ("InternEvo", "InternEvo", "PyTorch of 2023"),
    ("modded-nanogpt", "modded-nanogpt", "PyTorch of 2024, and another optimizer"),
    ("llm.c", "llm.c", "kernels written by hand"),
    ("Meta's own", "Meta's own", "PyTorch"),
    ("NeuronX", "NeuronX Distributed", "PyTorch"),
)
# Megatron-Bridge's own configurations of FSDP on these keep the activations of 20 and 40 layers in
# host memory (`cpu_offloading_num_layers` in scripts/performance/configs/llama), which its reports
# leave out.
_KEEPS_IN_HOST = {("llama3-70b", "GB300"), ("llama3-70b", "GB200")}
# A flag of rows, by its beginning.
_STATE_IN_HOST = "optimizer states are split inside a host"
# Frameworks that recompute only where they are told to, so that a row without a word on it does
# not; and that split the sequence beside tensor parallelism unless they are told not to.
_MEGATRON_CORE = ("Megatron-Bridge", "NeMo")
# Frameworks whose parameters and gradients are in 16 bits, beside a float32 copy of the parameters,
# so that devices send gradients in 16 bits. Megatron's send them in float32.
_GRADIENTS_IN_16_BITS = ("InternEvo",)
# Frameworks whose kernels, written by hand or by `torch.compile`, compute norms and activation
# functions again in the backward pass where nothing is recomputed. Of others this is not known.
_KERNELS_FUSE = ("Megatron", "NeMo", "fms-fsdp", "modded-nanogpt", "llm.c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A reported step that the zoo can express.

    `framework` and `reason` are those of `FRAMEWORKS`; `release` names the framework's release and
    the type of its products; `group` names source and model family; rows of one group are fitted
    together or held out together. `tensor`, `context`, `pipeline` and `expert` are degrees of
    parallelism. `is_fresh`: whether the row came to the database after all figures were fitted.
    """

    id: str
    device: str
    framework: str
    reason: str
    release: str
    group: str
    tensor: int
    context: int
    pipeline: int
    chunks: int
    expert: int
    is_fp8: bool
    seq_len: int
    measured_s: float
    measured_bytes: float | None
    settings: dict[str, Any]
    cluster: Cluster
    method: AbstractMethod
    num_micro_batches: int
    is_fresh: bool

    @property
    def model(self) -> dict[str, Any]:
        """Fields of the zoo's configuration."""
        fields: dict[str, Any] = self.settings["model"]
        return fields

    @property
    def is_fitted(self) -> bool:
        """Whether figures may be fitted to this row: half of the groups, by a hash of their
        names. Pipelines, split sequences, experts and products of 8 bits are never fitted.
        """
        if self.pipeline * self.context > 1 or self.is_fp8 or "num_experts" in self.model:
            return False
        if self.framework == "InternEvo":
            # One group with one model: what its small clusters show is tried on the large ones.
            return self.cluster.num_devices <= _FITTED_DEVICES
        return zlib.crc32(self.group.encode()) % 2 == 0


def express(row: dict[str, Any], *, is_fresh: bool = False) -> Case:
    """The step of a row, on the catalogue's devices as they are.

    Raises:
        InputError: it cannot be expressed, with the reason.
    """
    model, where, degrees, batch = (
        row[key] for key in ("model", "cluster", "parallelism", "batch")
    )
    measured = row["measured"]
    reasons = []
    if model["experts"]:
        if ((degrees["dp"] or 1) * (degrees["fsdp"] or 1)) % (degrees["ep"] or 1):
            reasons.append("experts split over more than the data ranks")
    pipeline, chunks = degrees["pp"] or 1, degrees["vp"] or 1
    if "interleaved" in (degrees["schedule"] or "") and chunks == 1:
        reasons.append("a number of virtual stages that is not stated")
    if (row.get("zoo") or {}).get("model"):
        reasons.append("a model that is not in the zoo")
    if "fp4" in row["precision"].lower():
        reasons.append("products of 4 bits")
    if where["device"] not in DEVICES:
        reasons.append(f"no preset for {where['device']}")
    if measured["step_s"] is None:
        reasons.append("no step time")
    said = (row["recompute"] or "").partition("(")[0].strip()
    if not said and row["framework"].startswith(_MEGATRON_CORE):
        said = "none"
    recompute = _RECOMPUTE.get(said)
    if recompute == "none" and row["framework"].startswith(_KERNELS_FUSE):
        recompute = "fused"
    if recompute is None:
        if "offload" in said:
            reasons.append("recomputation that keeps arrays in host memory")
        else:
            reasons.append(f"recomputation: {row['recompute'] or 'not stated'}")
    is_bridge = row["framework"].startswith("Megatron-Bridge")
    if is_bridge and degrees["fsdp"] and (model["name"], where["device"]) in _KEEPS_IN_HOST:
        reasons.append("recomputation that keeps arrays in host memory")
    in_host = any(flag.startswith(_STATE_IN_HOST) for flag in row.get("flags") or ())
    if in_host and (degrees["tp"] or 1) > 1:
        reasons.append("optimizer states split inside a host beside tensor parallelism")
    if reasons:
        raise InputError("; ".join(dict.fromkeys(reasons)))
    cluster = _cluster(where)
    framework, why_other = next(
        ((name, why) for start, name, why in FRAMEWORKS if row["framework"].startswith(start)),
        (row["framework"].split(",")[0], "another framework"),
    )
    count = batch["num_micro_batches"]
    if count is None and batch["micro_batch_sequences"]:
        ranks = (degrees["dp"] or 1) * (degrees["fsdp"] or 1)
        count = max(1, batch["global_sequences"] // (ranks * batch["micro_batch_sequences"]))
    if count is None and pipeline > 1:
        # Where the size of micro-batches is not stated, one sequence for each data rank.
        count = max(1, batch["global_sequences"] // ((degrees["dp"] or 1) * (degrees["fsdp"] or 1)))
    source = row["source"].get("repo") or str(row["source"].get("title") or row["id"].split("-")[0])
    return Case(
        id=row["id"],
        device=cluster.device.name,
        framework=framework,
        reason=why_other,
        release=f"{row['framework']}, {row['precision']}",
        group=f"{source} {model['name']}",
        tensor=degrees["tp"] or 1,
        context=degrees["cp"] or 1,
        pipeline=pipeline,
        chunks=chunks,
        expert=degrees["ep"] or 1,
        is_fp8=_is_fp8(row),
        seq_len=model["seq"],
        measured_s=measured["step_s"],
        measured_bytes=(measured["peak_memory_gib"] or 0) * 2**30 or None,
        settings=_settings(row, recompute or "none"),
        cluster=cluster,
        method=_method(row, cluster.num_devices, count or 1),
        num_micro_batches=count or 1,
        is_fresh=is_fresh,
    )


def is_harder(row: dict[str, Any]) -> bool:
    """Whether a complete row has a pipeline, split sequences, experts, or products of 8 bits or
    fewer.
    """
    degrees = row["parallelism"]
    is_split = (degrees["pp"] or 1) * (degrees["cp"] or 1) > 1
    is_narrow = _is_fp8(row) or "fp4" in row["precision"].lower()
    has_time = row["measured"]["step_s"] is not None
    return has_time and bool(is_split or row["model"]["experts"] or is_narrow)


def _settings(row: dict[str, Any], recompute: str) -> dict[str, Any]:
    """Arguments of `zoo.build`."""
    model = row["model"]
    heads = model["heads"]
    fields = {
        "name": model["name"],
        "family": "llama" if model["mlp"] == "swiglu" else "gpt",
        "num_layers": model["layers"],
        "hidden_size": model["hidden"],
        "num_heads": heads,
        "num_kv_heads": model["kv_heads"] or heads,
        "ffn_size": model["ffn"],
        "vocab_size": -(-model["vocab"] // 128) * 128,
        "seq_len": model["seq"],
        "tied_embedding": bool(model["tied_embeddings"]),
    }
    if model["experts"]:
        # Tokens are never dropped. gpt-oss is without its sliding windows and sinks, and DeepSeek
        # V3 without the prediction of several tokens and its choice of experts on few hosts.
        fields |= {
            "family": "mixtral",
            "num_experts": model["experts"],
            "top_k": model["experts_per_token"],
            "ffn_size": model["moe_ffn"],
            "shared_ffn_size": (model["shared_experts"] or 0) * model["moe_ffn"],
            "qk_norm": model["name"].startswith("qwen3"),
        }
        if "MLA" in (model["note"] or ""):
            fields |= _latent()
    head = model["head_dim"]
    if head and "kv_rank" not in fields and head * heads != model["hidden"]:
        fields["head_size"] = head
    half = "float16" if row["precision"].lower().startswith("fp16") else "bf16"
    dtype = half
    if row["framework"].startswith(_GRADIENTS_IN_16_BITS):
        dtype = "bf16-master"
    if _is_fp8(row):
        precision = row["precision"].lower()
        # Torchao scales by the arrays themselves; by whole ones where nothing else is said.
        is_torchao = precision.startswith("float8") or "tensorwise" in precision
        dtype = "fp8-tensor" if is_torchao else "fp8"
        dtype = "fp8-rows" if "rowwise" in precision else dtype
    attention = "plain" if "unfused" in (row["attention"] or "unfused") else "auto"
    return {
        "model": fields,
        "global_batch": row["batch"]["global_sequences"],
        "dtype": dtype,
        "recompute": recompute,
        "scan": row["framework"].startswith("MaxText") and "scan off" not in row["framework"],
        "attention": attention,
    }


def _latent() -> dict[str, Any]:
    """What DeepSeek V3 has besides experts."""
    published = as_fields(MODELS["deepseek-v3"])
    return {name: published[name] for name in _OF_DEEPSEEK}


def _is_fp8(row: dict[str, Any]) -> bool:
    """Whether linear layers multiply in 8 bits, with scales of tensors, rows or blocks."""
    precision = row["precision"].lower()
    return "fp8" in precision or "float8" in precision


def _cluster(where: dict[str, Any]) -> Cluster:
    device = DEVICES[where["device"]]
    count = where["devices"]
    if device.startswith("GB"):
        # Hosts of four in a domain of NVLink of 72.
        return Cluster.preset(f"{count}x{device}")
    if device.startswith("v"):
        per_host = count if count <= 8 and device != "v5p" else 4
    else:
        per_host = min(where["devices_per_host"] or 8, count)
    cluster = Cluster.preset(f"{count // per_host}x{per_host}x{device}")
    gbps = where.get("network_gbps") or _NETWORKS_GBPS.get(where["network"] or "")
    if (where["network"] or "").startswith("hybrid cube mesh"):
        gbps = _CUBE_MESH_GBPS
    if gbps is None:
        return cluster
    return cluster.with_network(gbps)


def _method(row: dict[str, Any], num_devices: int, count: int) -> AbstractMethod:
    degrees = row["parallelism"]
    tensor, pipeline, zero = degrees["tp"] or 1, degrees["pp"] or 1, degrees["zero"] or 0
    context = degrees["cp"] or 1
    expert = degrees["ep"] or 1
    replicas, sharded = degrees["dp"] or 1, degrees["fsdp"] or 1
    splits_sequence = degrees["sequence_parallel"]
    if splits_sequence is None:
        # MaxText splits residual streams over the tensor ranks along their features: as many bytes.
        splits_sequence = row["framework"].startswith((*_MEGATRON_CORE, "MaxText"))
    if tensor * context * pipeline * expert > 1:
        return Megatron(
            data=num_devices // (tensor * context * pipeline * expert),
            expert=expert,
            context=context,
            tensor=tensor,
            sequence=tensor > 1 and splits_sequence,
            pipeline=pipeline,
            chunks=degrees["vp"] or 1,
            zero_stage=3 if sharded > 1 else zero,
            num_micro_batches=count if pipeline > 1 else None,
        )
    if sharded > 1:
        return Zero3Parallel(shard_within=sharded if replicas > 1 else None)
    if any(flag.startswith(_STATE_IN_HOST) for flag in row.get("flags") or ()):
        return Zero2Parallel(shard_within="host")
    if zero == 1:
        return Megatron(data=num_devices, zero_stage=1)
    return Zero2Parallel() if zero else DataParallel()
