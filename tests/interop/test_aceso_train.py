"""Aceso's published configuration of a GPT of 1.3B parameters on 4 GPUs, at a small size, imported
and trained with all that a run needs.
"""

import pytest
from command_line import run
from interop.test_aceso_plans import configuration, names_of

from aliquot.report import read_metrics

LAYERS, STEPS = 24, 6
SMALL = {
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_size": 64,
    "vocab_size": 256,
    "seq_len": 16,
}
SETTINGS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]
UPDATE = "--weight-decay 0.01 --clip-grad 1 --optimizer adamw".split()
SCHEDULE = "--lr 3e-3 --min-lr 3e-4 --warmup-steps 2 --decay linear".split()
RUN = """
    --split 949,50,1 --seed 1234 --log-every 1 --eval-every 3 --eval-steps 2 --save-every 2 --keep 2
""".split()


def first_softmaxes_again(number, name):
    """Attention of the first three layers is recomputed from its scores on."""
    return 1, 0, int(number in {5, 6, 18, 19, 31, 32})


def published(path):
    """Four stages of one GPU each, cut inside layers, in micro-batches of one example."""
    layouts = (
        (79, first_softmaxes_again),
        *((count, lambda o, n: (1, 0, 0)) for count in (84, 84, 68)),
    )
    return configuration(
        path,
        [(count, 1, layout) for count, layout in layouts],
        names=names_of(LAYERS),
        micro=1,
        model_size="1_3B",
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=16,
        max_position_embeddings=16,
        global_batch_size=8,
    )


def rows(folder, key):
    return {row["step"]: row[key] for row in read_metrics(folder) if key in row}


def succeeded(*args):
    found = run(*args)
    assert found.exit_code == 0, found.output
    return found


@pytest.mark.slow
def test_the_published_configuration_of_1_3b_trains_as_one_device_does(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    tokens, plan = tmp_path / "tokens.bin", tmp_path / "plan.json"
    succeeded("data", tmp_path / "text.txt", "--out", tokens)
    model = ("gpt-1.3b", "--dtype", "float64", *SETTINGS)
    succeeded(
        *("aceso", "import", published(tmp_path / "config.json"), "--model", *model),
        *("--cluster", "4xcpu", "--out", plan, *UPDATE),
    )
    run_alike = ("--data", tokens, *UPDATE, *SCHEDULE, *RUN)
    train = ("train", *model, "--global-batch", 8, *run_alike)
    staged = (*train, "--devices", 4, "--plan", plan, "--out", tmp_path / "staged")
    done = succeeded(*staged, "--steps", STEPS)
    assert "validation loss" in done.stdout
    alone = ("--devices", 1, "--cluster", "1xcpu", "--method", "dp", "--recompute", "none")
    succeeded(*train, *alone, "--attention", "plain", "--out", tmp_path / "one", "--steps", STEPS)
    for key, steps in (("loss", range(1, STEPS + 1)), ("validation_loss", (3, 6))):
        found, wanted = rows(tmp_path / "staged", key), rows(tmp_path / "one", key)
        assert list(found) == list(wanted) == list(steps)
        assert found == pytest.approx(wanted, rel=1e-12)
    assert rows(tmp_path / "staged", "learning_rate") == rows(tmp_path / "one", "learning_rate")
    kept = sorted(path.name for path in (tmp_path / "staged" / "checkpoints").iterdir())
    assert kept == ["4", "6"]
