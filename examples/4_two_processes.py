"""Two processes train one model. Without an argument, this script starts both of them; on two
machines, set the same ALIQUOT_SECRET on both (`aliquot.runtime.make_secret()` makes one) and run

python examples/4_two_processes.py 0 ADDRESS    # here; ADDRESS is this one's: 10.0.0.1:12345
python examples/4_two_processes.py 1 ADDRESS    # there
"""

import socket
import subprocess
import sys


def train(process, address):
    import jax
    import numpy as np

    import aliquot as aq
    from aliquot import zoo
    from aliquot.runtime import initialize, shutdown

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)  # in each process

    # Before anything touches a device. On SLURM, Kubernetes and Cloud TPU it needs no arguments.
    # Each process runs one stage, so no collective joins the processes: `cpu_collectives=None`.
    initialize(address, num_processes=2, process_id=process, cpu_collectives=None)

    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_len": 32, "vocab_size": 256}
    work = zoo.build("gpt-10m", 8, overrides=sizes)
    method = aq.PipeshardParallel(num_stages=2, num_micro_batches=2, schedule="1f1b")
    plan = aq.plan(
        work.train_step,
        work.state,
        work.batch,
        cluster=aq.Cluster.preset("4xcpu"),
        method=method,
    )
    step = aq.parallelize(work.train_step, plan)
    state = step.init(work.init, jax.random.key(0))
    for number in range(5):
        rng = np.random.default_rng(number)  # every process passes the whole batch
        batch = {
            name: rng.integers(0, 16, array.shape).astype(array.dtype)
            for name, array in work.batch.items()
        }
        state, metrics = step(state, batch)
        print(f"process {process}, step {number}: loss {float(metrics['loss']):.4f}", flush=True)
    shutdown()  # last, in all processes


def start_both():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [subprocess.Popen([sys.executable, __file__, str(k), address]) for k in (0, 1)]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(int(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(start_both())
