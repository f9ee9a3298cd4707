"""Weights of Hugging Face: every family's arrays come to their places, in pieces, or are refused by
name; logits are those of transformers.
"""

import json
import re

import jax
import numpy as np
import pytest
from command_line import refused, run
from jax.sharding import NamedSharding, PartitionSpec

from aliquot.core import InputError
from aliquot.zoo import build_inference, from_config, read_weights
from aliquot.zoo._network import Network
from aliquot.zoo._precision import precision
from aliquot.zoo._safetensors import safetensors_in
from aliquot.zoo._weights import _Reader

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 264, "n_positions": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {"head_dim": 16, "moe_intermediate_size": 16, "norm_topk_prob": True}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
# Class of transformers, and what its configuration gets.
FAMILIES = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", SIZES),
    "llama3": ("Llama", {**SIZES, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", SIZES),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}),
    "mixtral": ("Mixtral", {**SIZES, **EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **EXPERTS, **QWEN}),
}


def write(path, arrays):
    """A file of safetensors with arrays of float32."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = array.astype(np.float32).tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": place}
        data += raw
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def llama_arrays(rng):
    """The arrays of a Llama as transformers names them and shapes them: (out, in)."""

    def draw(*shape):
        return 0.3 * rng.normal(size=shape)

    arrays = {
        "model.embed_tokens.weight": draw(264, 32),
        "model.norm.weight": 1 + draw(32),
        "lm_head.weight": draw(264, 32),
    }
    for k in range(2):
        arrays |= {
            f"model.layers.{k}.input_layernorm.weight": 1 + draw(32),
            f"model.layers.{k}.post_attention_layernorm.weight": 1 + draw(32),
            f"model.layers.{k}.self_attn.q_proj.weight": draw(32, 32),
            f"model.layers.{k}.self_attn.k_proj.weight": draw(16, 32),
            f"model.layers.{k}.self_attn.v_proj.weight": draw(16, 32),
            f"model.layers.{k}.self_attn.o_proj.weight": draw(32, 32),
            f"model.layers.{k}.mlp.gate_proj.weight": draw(48, 32),
            f"model.layers.{k}.mlp.up_proj.weight": draw(48, 32),
            f"model.layers.{k}.mlp.down_proj.weight": draw(32, 48),
        }
    return arrays


@pytest.fixture
def folder(tmp_path):
    """A Llama in two files, with an index."""
    arrays = llama_arrays(np.random.default_rng(3))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    names = list(arrays)
    weight_map = {}
    for k, part in enumerate((names[:9], names[9:])):
        file = f"model-{k + 1}-of-2.safetensors"
        write(tmp_path / file, {name: arrays[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def network(config, scan):
    dtypes = precision("float64")
    return Network(config, dtypes, recompute="none", scan=scan, attention="plain")


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, scan, tmp_path, x64):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    name, fields = FAMILIES[family]
    made = getattr(transformers, f"{name}Config")(**fields, eos_token_id=0, bos_token_id=0)
    model = getattr(transformers, _class(name))(made).double().eval()
    if "num_local_experts" in fields:
        # Its other products of experts know no float64.
        model.set_experts_implementation("eager")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    ids = np.random.default_rng(0).integers(0, 264, (2, 40))
    want = model(torch.tensor(ids)).logits.detach().numpy()

    config = from_config(tmp_path / "config.json", seq_len=40)
    whole = network(config, scan)
    fresh = whole.init(jax.random.key(0))["params"]
    params, notes = read_weights(tmp_path, config, fresh)
    got = np.asarray(whole.forward(params, ids))
    assert notes == []
    # transformers computes rotations, norms and gates in float32 whatever the dtype; of a GPT-2
    # nothing.
    assert np.abs(got - want).max() < (1e-14 if family == "gpt2" else 1e-6)
    assert np.abs(want).max() > 0.3


def _class(name):
    return "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"


def test_arrays_come_to_their_places_whatever_the_split(folder, mesh):
    config = from_config(folder / "config.json")
    shapes = build_inference(config, 8, dtype="float32", scan=True).params
    whole, _ = read_weights(
        folder, config, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    )
    arrays = safetensors_in(folder)
    np.testing.assert_array_equal(
        whole["layers"]["mlp"]["down"]["kernel"],
        [arrays[f"model.layers.{k}.mlp.down_proj.weight"].T for k in range(2)],
    )
    np.testing.assert_array_equal(whole["head"]["kernel"], arrays["lm_head.weight"].T)
    two = mesh(2, 4)

    def place(x):
        # Stacks of norms have two layers and no other dim to cut four ways.
        axes = (None, "x") if x.shape == (2, 32) else (None, "y", "x")[-len(x.shape) :]
        return jax.device_put(np.zeros(x.shape, x.dtype), NamedSharding(two, PartitionSpec(*axes)))

    split = jax.tree.map(place, shapes)
    asked = []
    before = _Reader.read

    def read(reader, index):
        block = before(reader, index)
        asked.append(block.size / np.prod(reader.shape))
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Reader, "read", read)
        pieces, _ = read_weights(folder, config, split)
    jax.tree.map(np.testing.assert_array_equal, pieces, whole)
    assert jax.tree.map(lambda x: x.sharding, pieces) == jax.tree.map(lambda x: x.sharding, split)
    # Matrices are cut eight ways, the rest two.
    assert max(asked) == 0.5 and min(asked) == 0.125


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_and_text_begin_with_them_under_any_plan(folder, scan, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 50)
    model = (folder / "config.json", "--devices", 8, "--json")
    first = {}
    for method in (*(("dp",) if scan else ()), "zero3", "megatron:dp2,tp2,pp2"):
        options = ("--data", text, "--steps", 1, "--global-batch", 8, "--dtype", "float32")
        more = ("--init-from", folder, "--method", method, *(["--scan"] if scan else []))
        done = run("train", *model, *options, *more)
        assert done.exit_code == 0, done.stderr
        assert f"beginning with the weights in {folder}" in done.stderr
        first[method] = json.loads(done.stdout)["losses"][0]
    assert max(first.values()) - min(first.values()) < 1e-5, first
    if scan:
        # Text is made by layers that are not scanned over.
        return
    texts = []
    prompts = [word for k in range(8) for word in ("--tokens", f"{72 + k},101")]
    for method in ("zero3", "megatron:dp2,tp2,pp2"):
        options = (*prompts, "--max-tokens", 8, "--method", method, "--dtype", "float32")
        done = run("generate", *model, "--checkpoint", folder, *options)
        assert done.exit_code == 0, done.stderr
        texts.append(json.loads(done.stdout)["tokens"])
    assert texts[0] == texts[1] and len(texts[0][3]) == 8


def test_text_needs_a_tokenizer(folder):
    refused(
        run("generate", folder / "config.json", "--checkpoint", folder, "--prompt", "a"),
        "has no tokenizer.json",
        "--tokens",
    )


def change(folder, name, arrays):
    """The second file with other arrays."""
    found = {k: v for k, v in safetensors_in(folder).items() if k not in name}
    (folder / "model.safetensors.index.json").unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    write(folder / "model.safetensors", {**found, **arrays})


def read(folder, **overrides):
    config = from_config(folder / "config.json", **overrides)
    shapes = build_inference(config, 8, dtype="float32").params
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return read_weights(folder, config, zeros)


def test_what_is_missing_or_of_another_shape_is_listed_at_once(folder):
    head, norm = "lm_head.weight", "model.layers.1.input_layernorm.weight"
    change(folder, (head, norm), {head: np.zeros((260, 32))})
    with pytest.raises(InputError) as error:
        read(folder)
    assert "lm_head.weight has shape (260, 32), and should have (264, 32)" in str(error.value)
    assert "layers.1.input_layernorm.weight is missing" in str(error.value)


def test_arrays_that_the_model_has_not_are_told(folder):
    change(folder, (), {"model.extra.weight": np.zeros(3), "model.rotary_emb.inv_freq": np.ones(4)})
    _, notes = read(folder)
    assert len(notes) == 1 and "1 array of it left out" in notes[0] and "extra.weight" in notes[0]


def test_weights_of_another_model_are_refused_by_its_fields(folder):
    with pytest.raises(InputError, match=r"rope_theta is 10000.0 there, and 5000.0 here"):
        config = from_config(folder / "config.json", rope_theta=5000.0)
        read_weights(folder, config, {})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: raw[:-40], "does not lie in it"),
        (lambda raw: raw[:100], "not complete"),
        (lambda raw: b"", "it is empty"),
        (lambda raw: (2**60).to_bytes(8, "little") + raw[8:], "no file of safetensors"),
        (lambda raw: raw[:8] + b"[" + raw[9:], "its header cannot be read"),
        (lambda raw: raw.replace(b"[32,", b"[-3,", 1).replace(b"[264,", b"[-64,"), "not"),
    ],
)
def test_a_spoiled_file_is_refused_by_its_name(folder, spoil, message):
    file = folder / "model-2-of-2.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(InputError, match=rf"(?s)model-2-of-2.*{re.escape(message)}"):
        read(folder)


def test_files_elsewhere_and_files_that_are_programs_are_not_read(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(InputError, match="another folder"):
        read(folder)
    index.unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"pytorch_model\.bin can only be read by running"):
        read(folder)
