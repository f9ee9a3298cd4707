"""A run that stops and goes on under another plan: data parallel first, then a pipeline of two
stages. Its losses are those of a run that never stopped.
"""

import tempfile

import jax

import aliquot as aq
from aliquot import zoo
from aliquot.data import Feed, standard_library

STEPS, FIRST = 10, 5


def train(work, text, plan, folder, until):
    """Go on from the newest checkpoint in a folder, if there is one, until a step."""
    step = aq.parallelize(work.train_step, plan).prepare(work.state, work.batch)
    with aq.Checkpoints(folder, every=FIRST) as checkpoints:
        restored = checkpoints.restore(step)
        state = restored.state if restored else step.init(work.init, jax.random.key(0))
        feed = Feed(text, position=restored.meta["position"] if restored else None)
        print(f"{plan.method} from step {feed.step} on")
        while feed.step < until:
            number, batch = feed.step, next(feed)
            state, metrics = step(state, batch)
            print(f"step {number}: loss {float(metrics['loss']):.4f}", flush=True)
            checkpoints.save(step, state, feed.step, meta={"position": feed.position})


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "seq_len": 32, "vocab_size": 256}
    rate = zoo.learning_rate(1e-2, steps=STEPS, warmup_steps=2, decay="cosine", end=1e-3)
    work = zoo.build(
        "gpt-10m",
        8,
        overrides=sizes,
        dtype="float32",
        recompute="none",
        learning_rate=rate,
        clip_norm=1.0,
    )
    text = zoo.text_for(work, standard_library())

    def plan(method):
        return aq.plan(work.train_step, work.state, work.batch, method=method)

    with tempfile.TemporaryDirectory() as folder:
        train(work, text, plan(aq.DataParallel()), folder, until=FIRST)
        stages = aq.PipeshardParallel(num_stages=2, num_micro_batches=2, schedule="1f1b")
        train(work, text, plan(stages), folder, until=STEPS)


if __name__ == "__main__":
    main()
