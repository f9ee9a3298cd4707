"""`aliquot train` on indexed data, mixtures and images: the same losses under every plan, and where
a run goes on.
"""

import json

import numpy as np
import pytest
from command_line import refused, run
from data.test_indexed import indexed

STEPS = 6
GPT = """
    gpt-10m --set num_layers=2 --set hidden_size=32 --set num_heads=2 --set num_kv_heads=2
    --set ffn_size=64 --set seq_len=16 --set vocab_size=64 --lr 1e-2
""".split()
RESNET = """
    wide-resnet-250m --set num_layers=14 --set image_size=16 --set num_classes=4
    --set num_channels=8 --set width_factor=1 --optimizer sgd --lr 1e-2
""".split()
RUN = f"--global-batch 8 --dtype float32 --steps {STEPS} --devices 4 --split 3,1 --json".split()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    counted = [np.arange(start, start + 200) % 50 for start in range(20)]
    drawn = [random.integers(0, 64, 100) for _ in range(20)]
    labels = random.integers(0, 4, 100)
    images = random.integers(0, 50, (100, 16, 16, 3)) + labels[:, None, None, None] * 50
    (folder / "images").mkdir()
    np.save(folder / "images/images.npy", images.astype(np.uint8))
    np.save(folder / "images/labels.npy", labels)
    one = indexed(folder, counted, "uint16", "counted")
    other = indexed(folder, drawn, "int32", "drawn")
    return {
        "mixture": [*GPT, "--data", f"0.75:{one}", "--data", f"0.25:{other}.bin"],
        "images": [*RESNET, "--data", folder / "images"],
        "folder": folder,
    }


@pytest.fixture(scope="module")
def trained(sources):
    """Losses by source and options, each trained once."""
    known = {}

    def train(source, *options):
        key = (source, *map(str, options))
        if key not in known:
            found = run("train", *sources[source], *RUN, *options)
            assert found.exit_code == 0, found.stderr
            known[key] = json.loads(found.stdout)
        return known[key]

    return train


@pytest.mark.parametrize(
    ("source", "method"),
    [
        ("mixture", "megatron:dp2,pp2"),
        pytest.param("images", "megatron:dp2,pp2", marks=pytest.mark.slow),
        pytest.param("mixture", "zero3", marks=pytest.mark.slow),
        pytest.param("images", "zero3", marks=pytest.mark.slow),
    ],
)
def test_losses_do_not_depend_on_the_plan(trained, source, method):
    plain = trained(source, "--method", "dp")
    other = trained(source, "--method", method)
    assert plain["losses"][-1] < plain["losses"][0]
    assert other["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    count = "measured_images_per_s" if source == "images" else "measured_tokens_per_s"
    assert plain[count] > 0


@pytest.mark.parametrize("source", ["mixture", "images"])
def test_a_run_goes_on_with_the_data_where_it_stopped(trained, sources, source, tmp_path):
    options = ("--method", "dp", "--out", tmp_path / "run", "--save-every", 4)
    first = run("train", *sources[source], *RUN, *options, "--steps", 4)
    assert first.exit_code == 0, first.stderr
    second = run("train", *sources[source], *RUN, *options)
    assert second.exit_code == 0, second.stderr
    losses = json.loads(first.stdout)["losses"] + json.loads(second.stdout)["losses"]
    assert losses == pytest.approx(trained(source, "--method", "dp")["losses"], rel=1e-6)
    assert "the data changes" not in second.stderr


def test_data_for_another_model_are_refused_before_the_search(sources):
    folder = sources["folder"]
    small = ["vocab_size=40" if part == "vocab_size=64" else part for part in GPT]
    refused(
        run("train", *small, *RUN, "--data", folder / "drawn"),
        "knows 40 tokens",
        "drawn.bin (Megatron-LM's, int32) needs at least 64",
        "--set vocab_size=64",
    )
    two_classes = ["num_classes=2" if part == "num_classes=4" else part for part in RESNET]
    refused(
        run("train", *two_classes, *RUN, "--data", folder / "images"),
        "class 3",
        "knows 2",
        "--set num_classes=4",
    )
    refused(run("train", *RESNET, *RUN, "--data", folder / "drawn.bin"), "a folder of images")
    text = folder / "text.txt"
    text.write_text("abc " * 500)
    refused(
        run("train", *GPT, *RUN, "--data", f"0.5:{text}", "--data", folder / "drawn"),
        "weights for some paths and none for",
    )
    refused(
        run("train", *GPT, *RUN, "--data", f"0.5:{text}", "--data", f"0.5:{folder / 'drawn'}"),
        "several tokenizers",
        "bytes",
    )
