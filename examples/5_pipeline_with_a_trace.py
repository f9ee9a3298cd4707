"""A GPT in two pipeline stages, with its predicted and its measured schedule as traces.

    python examples/5_pipeline_with_a_trace.py [FOLDER]

Open predicted.json and measured.json at https://ui.perfetto.dev.
"""

import sys
from pathlib import Path

import jax
import numpy as np

import aliquot as aq
from aliquot import report, zoo

# Four virtual devices; leave both lines out where there are real ones.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")

# Any step will do; this one comes from the zoo: a small GPT and 8 sequences.
sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_len": 32, "vocab_size": 256}
work = zoo.build("gpt-10m", 8, overrides=sizes)
arguments = (work.train_step, work.state, work.batch)

# Whatever is not given here is searched: the number of stages, micro-batches, the schedule.
method = aq.PipeshardParallel(num_stages=2, num_micro_batches=4, schedule="zero-bubble")
plan = aq.plan(*arguments, cluster=aq.Cluster.preset("4xcpu"), method=method)
print(plan)
report.planned_trace(plan).save(folder / "predicted.json")

step = aq.parallelize(work.train_step, plan)
state = step.init(work.init, jax.random.key(0))
rng = np.random.default_rng(0)
for number in range(5):
    batch = {
        name: rng.integers(0, 16, array.shape).astype(array.dtype)
        for name, array in work.batch.items()
    }
    state, metrics = step(state, batch)
    print(f"step {number}: loss {float(metrics['loss']):.4f}")

# One more step, whose programs run one after another so that each can be timed.
step.trace(state, batch).save(folder / "measured.json")
print(f"traces: {folder / 'predicted.json'}, {folder / 'measured.json'}")
