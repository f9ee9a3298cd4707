"""MaxText's own training step, compiled with settings of MaxText: how each array of its state is
split. Run by `maxtext_specs.py` in a process of its own, with MaxText on `PYTHONPATH`.

    python benchmarks/_maxtext_arrays.py JOB.json

A job says the platform, "cpu" or the name of a TPU topology such as "v5e-8"; the sizes of the
model; and, by case, files of settings with further arguments. Results are printed as one line of
JSON: by case and path, shape and axes of more than one device of each dim.
"""

import json
import os
import sys
from pathlib import Path

OPTIONS = (
    "run_name=specs",
    "base_output_directory=unused",
    "skip_jax_distributed_system=true",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "enable_goodput_recording=false",
    "packing=false",
    "scan_layers=false",
    "attention=dot_product",
)


def main() -> None:
    """Compile each case of the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    on_tpu = job["platform"] != "cpu"
    os.environ.update(
        JAX_PLATFORMS="cpu",
        DECOUPLE_GCLOUD="TRUE",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    if on_tpu:
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"

    import jax
    import maxtext
    from flax.linen.partitioning import axis_rules
    from jax.sharding import Mesh
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    configs = Path(maxtext.__file__).parent / "configs"

    def arrays(case: dict) -> dict:
        # Settings lie beside those that they extend.
        text = Path(case["settings"]).read_text()
        path = Path(case["settings"]).with_suffix(".beside.yml")
        path.write_text(text.replace("base.yml", str(configs / "base.yml")))
        where = (
            [f"compile_topology={job['platform']}", "compile_topology_num_slices=1"]
            if on_tpu
            else ["hardware=cpu"]
        )
        said = [f"{name}={value}" for name, value in (job["model"] | case["more"]).items()]
        config = pyconfig.initialize(["", str(path), *OPTIONS, *where, *said])
        mesh = (
            train_compile.get_topology_mesh(config)
            if on_tpu
            else Mesh(maxtext_utils.create_device_mesh(config, jax.devices()), config.mesh_axes)
        )
        args, kwargs, state, _, model = train_compile.get_shaped_inputs(mesh, config)
        parameters, state = sharding.maybe_update_params_sharding_with_opt(config, state)
        batch = sharding.get_input_data_sharding(config, mesh)
        step = maxtext_utils.get_functional_train_with_signature(
            train.train_step, batch, state, model, config, parameters
        )
        rules = axis_rules(config.logical_axis_rules)
        compiled = train_compile.jit_and_compile(
            step[0], args, kwargs, mesh, *step[1:], config, rules
        )
        shapes, _ = jax.tree_util.tree_flatten_with_path(args[0])
        splits = jax.tree.leaves(compiled.input_shardings[0][0])
        found = {}
        for (place, value), split in zip(shapes, splits, strict=True):
            # An axis of one device splits nothing; on TPUs the compiled program has no names.
            named = split.spec if hasattr(split, "spec") else ()
            dims = [(each,) if isinstance(each, str) else each or () for each in named]
            dims = [[axis for axis in axes if mesh.shape[axis] > 1] for axes in dims]
            found[jax.tree_util.keystr(place)] = {
                "shape": list(value.shape),
                "axes": dims + [[]] * (len(value.shape) - len(dims)),
                "shard": list(split.shard_shape(value.shape)),
            }
        return found

    print(json.dumps({name: arrays(case) for name, case in job["cases"].items()}))


if __name__ == "__main__":
    main()
