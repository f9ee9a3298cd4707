"""A `config.json` of Hugging Face becomes the model that it describes, or names the odd field."""

import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

from aliquot.core import InputError
from aliquot.zoo import MODELS, build, from_config
from aliquot.zoo._llama import Attention
from aliquot.zoo._precision import precision

GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
LLAMA31 = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA2 = {
    **LLAMA31,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 32000,
}
MISTRAL = {
    **{key: LLAMA31[key] for key in LLAMA31 if key not in ("attention_bias", "rope_scaling")},
    "model_type": "mistral",
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN25 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    **QWEN25,
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    **LLAMA2,
    "model_type": "mixtral",
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("config", "parameters", "seq_len"),
    [
        (GPT2, 124_439_808, 1024),
        (LLAMA2, 6_738_415_616, 4096),
        (LLAMA31, 8_030_261_248, 8192),
        (MISTRAL, 7_241_732_096, 4096),
        (QWEN25, 494_032_768, 8192),
        (QWEN3, 8_190_735_360, 8192),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_files_have_the_published_number_of_parameters(config, parameters, seq_len):
    made = from_config(config)
    assert build(made, 1, scan=True).num_parameters == parameters
    assert made.seq_len == seq_len


def test_a_published_file_is_the_named_model():
    said = from_config({**LLAMA31, "rope_scaling": None, "_name_or_path": "meta/llama3-8b"})
    assert said == MODELS["llama3-8b"]
    said = from_config({**QWEN3, "_name_or_path": "Qwen/Qwen3-8B"}, seq_len="4096")
    assert said == MODELS["qwen3-8b"]
    # Since version 5, rotations have a field of their own.
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    newer = {key: QWEN3[key] for key in QWEN3 if key != "rope_theta"} | {"rope_parameters": rope}
    assert from_config({**newer, "_name_or_path": "qwen3-8b"}, seq_len=4096) == said


def test_experts_are_those_of_the_models_by_name():
    for config, name in ((MIXTRAL, "mixtral-8x7b"), (QWEN3_MOE, "qwen3-30b-a3b")):
        made = from_config({**config, "_name_or_path": name}, seq_len=4096, balance_weight=0)
        assert made == MODELS[name]
    assert from_config(MIXTRAL, routing="capacity").routing == "capacity"
    assert from_config(MIXTRAL).balance_weight == 0.02


def test_a_model_is_called_as_its_folder(tmp_path):
    (tmp_path / "My-Llama").mkdir()
    path = tmp_path / "My-Llama" / "config.json"
    path.write_text(json.dumps(LLAMA2))
    made = from_config(path)
    assert made.name == "my-llama"
    assert build(made, 1, scan=True).settings["model"]["rope_theta"] == 10000.0


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**LLAMA2, "model_type": "gpt_neox"}, "model_type='gpt_neox' is not one of gpt2, llama"),
        ({**LLAMA2, "model_type": "mixtral"}, "num_local_experts is missing"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise=0.1: its operators"),
        ({**MIXTRAL, "rope_scaling": LLAMA31["rope_scaling"]}, "it has no scaled rotations"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "top_k=9 is more than num_experts=8"),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step=2: its operators"),
        ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers=[0]: its operators"),
        ({}, "model_type=None is not one of"),
        ({**LLAMA2, "hidden_act": "gelu"}, "hidden_act=gelu: its operators are those of silu"),
        ({**LLAMA2, "attention_bias": True}, "attention_bias=True: its operators are those of Fa"),
        ({**LLAMA2, "mlp_bias": True}, "mlp_bias=True"),
        ({**LLAMA31, "rope_scaling": YARN}, "rope_scaling={'rope_type': 'yarn', 'factor': 4.0}: "),
        (
            {**LLAMA31, "rope_scaling": {**LLAMA31["rope_scaling"], "factor": 0}},
            "rope_factor=0.0 must be",
        ),
        ({**QWEN25, "use_sliding_window": True, "sliding_window": 64, "seq": 1}, ""),
        ({**QWEN3, "layer_types": ["full_attention", "chunked"]}, "layer_types has chunked"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({**GPT2, "n_embd": "wide"}, "`n_embd`: expected `int`, got `str`"),
        ({**GPT2, "n_embd": -1}, "hidden_size=-1 must be at least 1"),
        ({k: v for k, v in GPT2.items() if k != "n_layer"}, "`n_layer`: is missing"),
        ({**LLAMA2, "auto_map": {"AutoModel": "x.Y"}}, "auto_map={'AutoModel': 'x.Y'} stands for"),
        ({**LLAMA2, "quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_expressed_is_refused_by_its_field(config, said):
    # A window is only too short for longer sequences.
    overrides = {} if said else {"seq_len": 128}
    with pytest.raises(InputError) as refused:
        from_config(config, **overrides)
    assert (said or "sliding_window=64 is shorter than a sequence of 128") in str(refused.value)


def test_all_faults_are_listed():
    with pytest.raises(InputError) as refused:
        from_config({**LLAMA31, "hidden_act": "relu", "mlp_bias": True, "rope_scaling": YARN})
    assert "3 problems" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "it holds no object"),
        ("\xff", "is not JSON"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_none(tmp_path, content, said):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=said):
        from_config(path)


def test_attention_is_that_of_qwen_and_llama31():
    """Biases, normalised heads and slower long rotations, against NumPy."""
    small = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    config = from_config(
        {**QWEN3, **small},
        qkv_bias=True,
        rope_factor=8.0,
        rope_theta=1e5,
    )
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        module = Attention(config, precision("float64"), rngs=nnx.Rngs(0))
        graph, state = nnx.split(module)
        state = jax.tree.map(lambda x: rng.normal(size=x.shape), state)
        x = rng.normal(size=(1, 6, 8))
        found = nnx.merge(graph, state)(x)
    weights = nnx.to_pure_dict(state)

    def heads(name, count):
        return (x @ weights[name]["kernel"] + weights[name]["bias"]).reshape(1, 6, count, 4)

    def normalised(y, name):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * weights[name]["scale"]

    frequencies = []
    for frequency in (1.0, 1e5**-0.5):
        length = 2 * math.pi / frequency
        share = min(max((8192 / length - 1) / 3, 0), 1)
        frequencies.append((1 - share) * frequency / 8 + share * frequency)
    angle = np.arange(6)[:, None, None] * np.array(frequencies)

    def rotated(y):
        first, second = y[..., :2], y[..., 2:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    q = rotated(normalised(heads("q", 2), "q_norm"))
    k = rotated(normalised(heads("k", 1), "k_norm"))[:, :, 0]
    scores = np.einsum("bqhe,bke->bhqk", q, k) / 2 + np.triu(np.full((6, 6), -1e9), 1)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    attended = np.einsum("bhqk,bke->bqhe", chances, heads("v", 1)[:, :, 0]).reshape(1, 6, 8)
    np.testing.assert_allclose(found, attended @ weights["out"]["kernel"], rtol=1e-9)
