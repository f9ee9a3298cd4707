"""Two hosts of a Ray cluster train one model, and go on after one of them has failed. This script
makes the cluster itself, of two hosts that are both this machine. On a cluster of your own (`ray
start --head` on one machine, `ray start --address=...` on the others) type

aliquot launch ray --num-devices-per-host 2 --max-restarts 1 -- python 9_two_hosts_under_ray.py
"""

import os
import signal
import tempfile


def train(folder):
    import jax
    import numpy as np

    import aliquot as aq
    from aliquot import zoo
    from aliquot.runtime import initialize, shutdown

    # The launcher has told where the others are. Each process runs one stage, so no collective
    # joins the processes: `cpu_collectives=None`.
    initialize(cpu_collectives=None)
    process, attempt = jax.process_index(), int(os.environ["ALIQUOT_ATTEMPT"])

    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_len": 32, "vocab_size": 256}
    work = zoo.build("gpt-10m", 8, overrides=sizes)
    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=2, schedule="1f1b")
    cluster = aq.Cluster.preset("2x2xcpu")
    plan = aq.plan(work.train_step, work.state, work.batch, cluster=cluster, method=method)
    step = aq.parallelize(work.train_step, plan)
    with aq.Checkpoints(folder, keep=2) as checkpoints:
        step.prepare(work.state, work.batch)
        restored = checkpoints.restore(step)
        first = restored.number if restored else 0
        state = restored.state if restored else step.init(work.init, jax.random.key(0))
        for number in range(first, 5):
            rng = np.random.default_rng(number)
            batch = {
                name: rng.integers(0, 16, array.shape).astype(array.dtype)
                for name, array in work.batch.items()
            }
            state, metrics = step(state, batch)
            if process == 0:
                print(f"step {number}: loss {float(metrics['loss']):.4f}", flush=True)
            checkpoints.save(step, state, number + 1)
            if (process, attempt, number) == (1, 1, 2):
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)  # as if this host had failed
    shutdown()


def launch_on_two_hosts():
    from ray.cluster_utils import Cluster

    import aliquot as aq

    os.environ["JAX_PLATFORMS"] = "cpu"
    hosts = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    hosts.add_node(num_cpus=2)
    with tempfile.TemporaryDirectory() as folder:
        aq.launch(
            [__file__, folder],
            "ray",
            address=hosts.address,
            num_devices_per_host=2,
            max_restarts=1,
        )
    hosts.shutdown()


if __name__ == "__main__":
    import sys

    if "ALIQUOT_PROCESS_ID" in os.environ:
        train(sys.argv[1] if len(sys.argv) > 1 else "checkpoints")
    else:
        launch_on_two_hosts()
