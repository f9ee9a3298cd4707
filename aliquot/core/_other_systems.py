"""Names and arguments of Alpa: what to write here instead.

`docs/coming-from.md` has a row with the same words for each. Options of commands are in
`cli/_other_names.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping

from ._errors import InputError
from ._text import listing

_NO_GLOBALS = (
    "None is needed: nothing is global. `aq.Cluster.detect()` describes the devices, `step.meshes`"
    " are those of a step, and `jax.device_count()` counts them."
)
_CLUSTER = (
    'Write `aq.Cluster.preset("2x8xH100")`, which describes devices; those of a step are'
    " JAX's own, in `step.meshes`."
)
_REMAT = (
    "Nothing is needed: plans say what layers recompute, and each stage recomputes what its memory"
    " calls for. `jax.checkpoint` in the model is kept; by name, `--recompute block`."
)
_LAYERS = (
    'Write `layers=8` in `aq.PipeshardParallel`, or a pattern of paths, `layers="params.layers[*]"`'
    ", or nothing: then stages may begin at every suitable place."
)
_LAYOUT = (
    "Write `aq.Megatron(data=2, tensor=2, pipeline=2)`; `data=None` takes all devices that the"
    " other degrees leave."
)
_PLAN = (
    'Write `plan = aq.Plan.load("plan.json")` and `aq.parallelize(train_step, plan)`: a plan is run'
    " as it is, and needs no method."
)

#: For each name of the module `alpa` that is not one of this package: what to write.
NAMES_ELSEWHERE: Mapping[str, str] = {
    "init": (
        "None is needed: JAX finds the devices of this process. In each of several processes call"
        " `aliquot.runtime.initialize()`."
    ),
    "shutdown": (
        "None is needed: nothing outlives the process. In each of several processes call"
        " `aliquot.runtime.shutdown()`."
    ),
    **dict.fromkeys(
        ("grad", "value_and_grad"),
        "Write `jax.grad` or `jax.value_and_grad`: where gradients end and the update begins is"
        " read from the step.",
    ),
    "clear_executable_cache": (
        "None is needed: each step holds its own programs, and `jax.clear_caches()` drops those of"
        " JAX."
    ),
    "set_seed": (
        "None is needed: random numbers are those of the keys that the step is given, such as"
        " `jax.random.key(0)`, under every plan."
    ),
    "global_config": (
        "None is needed: settings are arguments of `aq.plan`, and those of the compiler are in"
        " `XLA_FLAGS`."
    ),
    **dict.fromkeys(
        (
            "get_global_cluster",
            "get_global_num_devices",
            "get_global_physical_mesh",
            "get_global_virtual_physical_mesh",
            "set_global_virtual_physical_mesh",
        ),
        _NO_GLOBALS,
    ),
    **dict.fromkeys(
        (
            "DeviceCluster",
            "PhysicalDeviceMesh",
            "LocalPhysicalDeviceMesh",
            "DistributedPhysicalDeviceMesh",
            "PhysicalDeviceMeshGroup",
            "VirtualPhysicalMesh",
            "LogicalDeviceMesh",
        ),
        _CLUSTER,
    ),
    **dict.fromkeys(
        ("DistributedArray", "ReplicatedDistributedArray"),
        "None is needed: arrays are `jax.Array`s, and `array.sharding` says where their parts are.",
    ),
    "prefetch": "Write `array.copy_to_host_async()` of `jax.Array`.",
    **dict.fromkeys(("get_3d_parallel_method", "ThreeDParallel"), _LAYOUT),
    "LocalPipelineParallel": (
        "None is needed: pipelines run on virtual devices of one process, after"
        ' `jax.config.update("jax_num_cpu_devices", 8)`. `step.check(state, batch)` compares them'
        " with the plain step."
    ),
    "CreateStateParallel": (
        "Write `state = step.init(init_fn, key)`: each device computes only its part of the state."
    ),
    "FollowParallel": (
        "Write `aq.evaluator(step, evaluate, state, batch)`: a function that is computed where the"
        " state of the step lies."
    ),
    "AutoShardingOption": (
        "None is needed: `aq.ShardParallel()` searches all splits. `aq.DataParallel()`,"
        " `aq.Zero2Parallel()` and `aq.Zero3Parallel()` are forced ones, and"
        " `intra=aq.Fixed(zero_stage=2)` is so inside stages."
    ),
    "ManualShardingOption": (
        'Write `aq.ManualParallel(specs={"batch.*": ("x",)}, mesh_shape=(4, 2))`: your own splits'
        " by path, and a solver splits the rest."
    ),
    **dict.fromkeys(
        (
            "AutoLayerOption",
            "ManualLayerOption",
            "automatic_layer_construction",
            "manual_layer_construction",
            "mark_pipeline_boundary",
        ),
        _LAYERS,
    ),
    "FollowLayerOption": "None is needed: layers are found in each function that is planned.",
    **dict.fromkeys(("automatic_remat", "manual_remat"), _REMAT),
    "AutoStageOption": (
        "Write `inter=aq.StageDP()` in `aq.PipeshardParallel`, or nothing, as it is the default."
        ' Measured costs are `profiles="h100.sqlite"` of `aq.plan`.'
    ),
    "ManualStageOption": (
        "Write `inter=aq.ManualStages(boundaries=((0, 12), (12, 24)), options=(...))` in"
        " `aq.PipeshardParallel`: the layers of each stage, and how it is split; a name that is"
        " unknown is answered with all."
    ),
    "UniformStageOption": (
        "Write `inter=aq.Grid()` in `aq.PipeshardParallel`, which tries all equal stages, and"
        " `num_stages=4` for their number."
    ),
    **dict.fromkeys(("plan_to_method", "ParallelPlan"), _PLAN),
    "get_last_dp_result": "Write `print(plan)`: stages, costs and the bound are part of the plan.",
    "ProfilingResultDatabase": (
        'Write `aq.plan(..., profiles="h100.sqlite")`, a file of `aliquot profile run`.'
    ),
    "estimate_hlo_module_cost": (
        "Write `aq.estimate(plan, train_step, state, batch)`, which prices a plan, whoever made it."
    ),
    "DataLoader": (
        "Write `aliquot.data.Feed(source)`, or take any loader: a step places the batches that it"
        " is given, and `step.place` does so early."
    ),
    "MeshDriverDataLoader": (
        "Write `aliquot.data.Feed(source, rows=step.local_rows())`: each process reads only the"
        " rows that its devices need."
    ),
    "save_checkpoint": (
        "Write `aq.Checkpoints(folder).save(step, state, number)`, or `step.save(state, folder)`."
    ),
    "restore_checkpoint": (
        "Write `aq.Checkpoints(folder).restore(step)`, or `step.restore(folder)`, under any plan."
    ),
    **dict.fromkeys(
        ("timers", "tracer"),
        "Write `step.trace(state, batch)` for the seconds of each program, `step.stats()` for those"
        " of the compiler, and `aq.MetricsLog` for those of a run.",
    ),
    "collective": "None is needed: collectives are those of XLA, on the arrays of a step.",
    "model": "Write `aliquot.zoo`, whose models `aliquot models` lists.",
    "serve": (
        "There is no server: `aliquot generate` writes text, and `aliquot.zoo.build_inference`"
        " gives its functions."
    ),
}

_SOLVER_OPTION = (
    "Leave it out, or write what it forced: `method=aq.DataParallel()`, `aq.Zero2Parallel()` or"
    " `aq.Zero3Parallel()`; inside stages `intra=aq.Fixed(zero_stage=2)`."
)

#: For each argument of Alpa's `parallelize` and of its methods: what to write.
ARGUMENTS_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("static_argnums", "donate_argnums", "batch_argnums"),
        "Leave it out: what is static, what is state and donated, and which dims hold examples is"
        " read from the step.",
    ),
    "devices": (
        "Write `cluster=aq.Cluster.preset(...)` in `aq.plan`, or `devices=[...]` in"
        " `aq.parallelize`, beside the method."
    ),
    "num_micro_batches": (
        "Write `num_micro_batches=4` in `aq.plan` or `aq.parallelize`, beside the method."
    ),
    **dict.fromkeys(("auto_sharding_option", "default_auto_sharding_option"), _SOLVER_OPTION),
    "manual_sharding_option": (
        'Write `method=aq.ManualParallel(specs={"batch.*": ("x",)}, mesh_shape=(4, 2))`.'
    ),
    "pipeline_schedule": (
        'Write `schedule="1f1b"`, or `"gpipe"`, `"1f1b-overlap-friendly"`, `"zero-bubble"` or'
        ' `"interleaved-1f1b"`; without it the fastest of `"1f1b"` and the last two is found.'
    ),
    "layer_option": (
        'Write `layers=8`, or a pattern of paths, `layers="params.layers[*]"`, or nothing: then'
        " stages may begin at every suitable place."
    ),
    "stage_option": (
        "Write `inter=aq.StageDP()`, the default, `aq.Grid()` for equal stages or"
        " `aq.ManualStages(...)` for your own, and `num_stages=4` for their number."
    ),
    "stage_input_shardings": "Leave it out: what crosses between stages is split by the search.",
}


def refuse_arguments(of: str, takes: Callable[..., object], given: Iterable[str]) -> None:
    """Refuse arguments that another system's function of this name takes, and `takes` does not.

    Raises:
        InputError: For each of them, what to write instead.
    """
    elsewhere = [name for name in given if name in ARGUMENTS_ELSEWHERE]
    if not elsewhere:
        return
    own = inspect.signature(takes).parameters
    faults = [
        f"{name} is Alpa's. {ARGUMENTS_ELSEWHERE[name]}" for name in elsewhere if name not in own
    ]
    if faults:
        raise InputError(listing(f"{of} has no such argument", faults))
