"""Names, sizes and overrides of models."""

import pytest

from aliquot.core import InputError
from aliquot.zoo import MODELS, ModelConfig, build, configure

PUBLISHED = {
    "gpt-10m": 10e6,
    "gpt-125m": 125e6,
    "gpt-350m": 350e6,
    "gpt-760m": 760e6,
    "gpt-1.3b": 1.3e9,
    "gpt-2.6b": 2.6e9,
    "gpt-6.7b": 6.7e9,
    "gpt-13b": 13e9,
    "gpt-15b": 15e9,
    "gpt-39b": 39e9,
    "gpt-76b": 76e9,
    "gpt-175b": 175e9,
    **{f"scale-layer-{n}": 27.26e6 + 3.15e6 * n for n in (8, 16, 32, 64, 128, 256, 512, 1024)},
    "bert-base": 110e6,
    "bert-large": 335e6,
    "bert-350m": 350e6,
    "bert-760m": 760e6,
    "bert-1.3b": 1.3e9,
    "bert-2.6b": 2.6e9,
    "llama-7b": 6.738e9,
    "llama-11b": 10.95e9,
    "llama-13b": 13.016e9,
    "llama-2-7b": 6.738e9,
    "llama-2-13b": 13.016e9,
    "llama-70b": 68.98e9,
    "llama3-8b": 8.030e9,
    "llama3-70b": 70.554e9,
    "llama3.1-405b": 405.853e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-1.7b": 1.7206e9,
    "qwen3-4b": 4.0225e9,
    "qwen3-8b": 8.1907e9,
    "qwen3-14b": 14.768e9,
    "qwen3-32b": 32.762e9,
    "qwen3-30b-a3b": 30.532e9,
    "qwen3-235b-a22b": 235.094e9,
    "mixtral-8x7b": 46.703e9,
    "mixtral-8x22b": 140.62e9,
    "deepseek-moe-16b": 16.375e9,
    "deepseek-v2-lite": 15.706e9,
    "deepseek-v3": 671.03e9,
    "gpt-oss-like-20b": 20.9e9,
    "gpt-oss-like-120b": 116.8e9,
    "moe-380m": 380e6,
    "moe-690m": 690e6,
    "moe-1.3b": 1.3e9,
    "moe-2.4b": 2.4e9,
    "moe-7.1b": 7.1e9,
    "moe-10b": 10e9,
    "moe-27b": 27e9,
    "moe-70b": 70e9,
    "t5-770m": 737.7e6,
    "t5-3b": 2.85e9,
    "t5-6b": 5.67e9,
    "t5-11b": 11.3e9,
    "t5-22b": 22.6e9,
    "wide-resnet-250m": 250e6,
    "wide-resnet-500m": 500e6,
    "wide-resnet-1b": 1e9,
    "wide-resnet-2b": 2e9,
    "wide-resnet-4b": 4e9,
    "wide-resnet-6.8b": 6.8e9,
    "wide-resnet-13b": 13e9,
    "unet-470m": 0.47e9,
    "unet-1b": 1.06e9,
    "unet-1.2b": 1.21e9,
    "unet-1.8b": 1.88e9,
    "unet-2b": 2.08e9,
}


def test_every_model_has_a_published_size():
    assert set(PUBLISHED) == set(MODELS)


# The first of each family.
_FIRST = {name.split("-")[0]: name for name in reversed(PUBLISHED)}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _FIRST.values() else pytest.mark.slow)
        for name in PUBLISHED
    ],
)
def test_parameter_count(name):
    special = {
        "gpt-10m": 0.1,
        "deepseek-moe-16b": 0.035,
        "gpt-15b": 0.03,
        "moe-1.3b": 0.04,
        "wide-resnet-13b": 0.03,
    }
    tolerance = special.get(name, 0.001 if name.startswith(("llama", "qwen")) else 0.025)
    # As a scan where that can be: a trace of a hundred layers takes a second.
    workload = build(name, 1, scan=not name.startswith(("wide-resnet", "unet")))
    assert workload.num_parameters == pytest.approx(PUBLISHED[name], rel=tolerance)


@pytest.mark.parametrize("name", ["gpt-2.6b", "llama-70b"])
def test_flops_are_about_six_per_parameter_and_token(name):
    workload = build(name, 4)
    config = workload.config
    attention = 12 * config.num_layers * config.seq_len * config.hidden_size
    assert config.flops_per_token - attention == pytest.approx(
        6 * workload.num_parameters, rel=0.01
    )
    assert (
        workload.flops_per_step
        == 4 * config.seq_len * config.flops_per_token
        == 4 * config.flops_per_example
    )


def test_head_size_of_its_own():
    config = MODELS["llama-11b"]
    assert (config.head_dim, config.num_heads * config.head_dim, config.hidden_size) == (
        128,
        4096,
        6656,
    )
    layer = build("llama-11b", 1, scan=True).state["params"]["layers"]["attn"]
    assert layer["q"]["kernel"].shape == (32, 6656, 4096)
    assert layer["out"]["kernel"].shape == (32, 4096, 6656)
    # The published count of a layer of CFP's GPT-F: 72 * tokens * width ** 2, without attention's
    # own products.
    gpt = configure("gpt-6.7b", num_layers=2)
    ends = 6 * gpt.hidden_size * gpt.vocab_size + 12 * 2 * gpt.seq_len * gpt.hidden_size
    assert 24 * gpt.seq_len * (gpt.flops_per_token - ends) == pytest.approx(59.3736e12, rel=1e-4)
    with pytest.raises(InputError, match=r"head_size=-1 must be at least 1"):
        configure("gpt-125m", head_size=-1)
    with pytest.raises(InputError, match=r"head_size = 9 is odd"):
        configure("llama-7b", head_size=9)


def test_overrides_are_parsed_and_followed():
    config = configure(
        "llama-70b", hidden_size="1024", num_heads="16", norm_epsilon="1e-3", tied_embedding="yes"
    )
    assert (config.hidden_size, config.num_heads, config.norm_epsilon) == (1024, 16, 1e-3)
    assert config.tied_embedding is True
    assert (config.ffn_size, config.num_kv_heads) == (3584, 2)
    assert configure("gpt-125m", hidden_size=96, ffn_size=100).ffn_size == 100


def test_unknown_model_gives_the_nearest_name():
    with pytest.raises(InputError, match=r"no model 'gpt-1\.4b': did you mean 'gpt-1\.3b'"):
        configure("gpt-1.4b")


def test_all_bad_overrides_are_listed():
    with pytest.raises(InputError) as error:
        configure(
            "gpt-125m",
            num_layer=4,
            hidden_size="wide",
            seq_len=2.5,
            tied_embedding="maybe",
            family="llama",
        )
    for part in (
        "'num_layer': did you mean 'num_layers'",
        "hidden_size='wide' is not a whole number",
        "seq_len=2.5 is not a whole number",
        "tied_embedding='maybe' is not true or false",
        "no field 'family'",
    ):
        assert part in str(error.value)


def test_all_impossible_sizes_are_listed():
    with pytest.raises(InputError) as error:
        configure("gpt-125m", hidden_size=100, num_heads=12, num_kv_heads=5)
    assert "hidden_size=100 is not a multiple of num_heads=12" in str(error.value)
    assert "num_heads=12 is not a multiple of num_kv_heads=5" in str(error.value)
    with pytest.raises(
        InputError, match=r"num_layers=0 must be at least 1.*norm_epsilon=-1.0 must be positive"
    ):
        configure("llama-7b", num_layers=0, norm_epsilon=-1)
    with pytest.raises(InputError, match="odd"):
        configure("llama-7b", hidden_size=96)


def test_config_is_checked_however_it_is_made():
    fields = {f: getattr(MODELS["gpt-10m"], f) for f in ModelConfig.__slots__}
    with pytest.raises(InputError, match="family='rnn' is not one of gpt, llama, bert"):
        ModelConfig(**(fields | {"family": "rnn"}))
