"""Plans of PyTorch modules: the captured step gives PyTorch's losses, plans that are applied give
those of one process, and what cannot be planned is refused by its line.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import aliquot as aq  # noqa: E402
from aliquot.core import CaptureError, InputError, PlanMismatchError  # noqa: E402
from aliquot.torch._export import _drop_constant_masks  # noqa: E402

_PATH = Path(__file__).with_name("split_training.py")
_SPEC = importlib.util.spec_from_file_location("split_training", _PATH)
training = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(training)

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}
CLUSTER = aq.Cluster.preset("4xcpu")


def state_of(step, module):
    """A state with the module's numbers."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.state)
    for part in ("params", "buffers"):
        for name in state.get(part, {}):
            state[part][name] = named[name].detach().numpy().copy()
    return state


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*(("language", optimizer) for optimizer in OPTIMIZERS), ("images", "adamw")],
)
def test_the_step_in_jax_gives_the_losses_of_pytorch(name, optimizer, x64):
    module, batch = training.make(name)
    update = OPTIMIZERS[optimizer](module.parameters())
    made = aq.torch.training_step(module, update, batch, training.loss)
    state = state_of(made, module)
    arrays = {key: x.numpy() for key, x in batch.items()}
    run, ours, theirs = jax.jit(made.step), [], []
    for _ in range(3):
        state, metrics = run(state, arrays)
        ours.append(float(metrics["loss"]))
        update.zero_grad()
        loss = training.loss(module, batch)
        loss.backward()
        update.step()
        theirs.append(loss.item())
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)
    if name == "images":
        # Running figures are new, and a buffer that does not change is a constant of the step.
        assert set(state["buffers"]) == {n for n, _ in module.named_buffers() if "norms" in n}
        for key, value in state["buffers"].items():
            np.testing.assert_allclose(value, module.get_buffer(key), rtol=1e-12)
    else:
        # Tied parameters are one.
        assert "head.weight" not in state["params"]


def test_applied_plans_give_the_losses_of_one_process(tmp_path):
    methods = {
        "dp": aq.DataParallel(),
        "zero2": aq.Zero2Parallel(),
        "zero3": aq.Zero3Parallel(),
        "hsdp": aq.Zero3Parallel(shard_within=2),
        "tp": aq.TensorParallel(degree=2),
        "shard": aq.ShardParallel(),
    }
    alone, sizes = {}, {}
    for name in training.MODULES:
        # Blocks are computed again, by FSDP and with products that are split.
        recompute = "block" if name == "blocks" else "none"
        kept = ("zero3", "tp") if name == "blocks" else methods
        for key, method in ((key, methods[key]) for key in kept):
            module, batch = training.make(name)
            planned = aq.torch.plan(
                module,
                *("adamw", batch, training.loss),
                cluster=CLUSTER,
                method=method,
                num_micro_batches=1,
                recompute=recompute,
            )
            planned.save(tmp_path / f"{name}.{key}.json")
        alone[name] = training.train(module, batch)
        sizes[name] = sum(p.numel() for p in module.parameters())
    command = [sys.executable, "-W", "ignore", str(_PATH), str(tmp_path)]
    started = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(training.WORLD)
    ]
    said = [process.communicate(timeout=500)[0] for process in started]
    assert [process.returncode for process in started] == [0] * training.WORLD
    found = json.loads(said[0])
    assert len(found) == 2 * len(methods) + 2
    for key, run in found.items():
        np.testing.assert_allclose(
            run["losses"], alone[key.partition(".")[0]], rtol=0, atol=1e-12, err_msg=key
        )
    # Blocks run once for the loss, and once more for its gradient.
    again = {key: run["blocks"] for key, run in found.items() if "blocks" in key}
    assert again == dict.fromkeys(("blocks.zero3", "blocks.tp"), training.STEPS * 2 * 3)
    # What a process holds is what the plan says: all, a quarter, or half.
    for name in ("language", "images"):
        size = sizes[name]
        assert found[f"{name}.dp"]["held"] == size
        assert found[f"{name}.zero3"]["held"] < 0.3 * size
        assert 0.45 * size < found[f"{name}.hsdp"]["held"] < 0.55 * size
    assert found["language.tp"]["held"] < 0.6 * sizes["language"]


class Odd(torch.nn.Module):
    def __init__(self, what):
        super().__init__()
        self.linear, self.what = torch.nn.Linear(4, 4), what

    def forward(self, x):
        y = self.linear(x)
        if self.what == "values" and y.sum() > 0:
            return y
        if self.what == "operator":
            y = torch.linalg.lu_factor(y)[0]  # the line that is named
        if self.what == "dropout":
            y = torch.nn.functional.dropout(y, 0.1, True)
        if self.what == "transposed":
            y = torch.nn.functional.conv_transpose1d(y[None], torch.ones(4, 4, 1))
            y = torch.nn.functional.conv_transpose1d(y, torch.ones(4, 4, 1), stride=2)  # the second
        return y


@pytest.mark.parametrize(
    ("what", "messages"),
    [
        ("operator", ["aten.linalg_lu_factor", "test_plan.py, line", "aliquot.torch.operator"]),
        ("dropout", ["a dropout of 0.1", "test_plan.py, line"]),
        ("transposed", ["aten.convolution.default", "a transposed convolution", "test_plan.py"]),
        ("values", ["Odd cannot be traced by torch.export", "torch.where"]),
    ],
)
def test_what_cannot_be_planned_is_named_with_its_line(what, messages):
    batch = {"x": torch.ones(4, 4)}
    with pytest.raises(CaptureError) as error:
        aq.torch.plan(Odd(what), "sgd", batch, lambda m, b: m(b["x"]).sum(), cluster=CLUSTER)
    assert all(message in str(error.value) for message in messages), str(error.value)
    # All at once, each with its line.
    assert str(error.value).count("test_plan.py, line") == {"transposed": 2, "values": 0}.get(
        what, 1
    )


def test_blocks_are_computed_again(x64):
    """The same numbers, and less memory: of a layer only what enters it is kept."""
    module, batch = training.make("blocks")
    losses, memory = [], []
    for recompute in ("none", "block"):
        asked = (module, "adamw", batch, training.loss)
        made = aq.torch.training_step(*asked, recompute=recompute)
        arrays = {key: x.numpy() for key, x in batch.items()}
        losses.append(float(jax.jit(made.step)(state_of(made, module), arrays)[1]["loss"]))
        large = {key: x.repeat(64, 16) for key, x in batch.items()}
        asked = (module, "adamw", large, training.loss)
        planned = aq.torch.plan(
            *asked, cluster=CLUSTER, method=aq.DataParallel(), recompute=recompute
        )
        assert planned.model.settings["recompute"] == recompute
        memory.append(planned.prediction.peak_memory_bytes)
    assert losses[0] == pytest.approx(losses[1], abs=1e-13)
    assert memory[1] < 0.7 * memory[0]


@pytest.mark.parametrize(("name", "asked"), [("images", "block"), ("blocks", "minimal")])
def test_what_cannot_be_computed_again_is_refused(name, asked):
    module, batch = training.make(name)
    with pytest.raises(InputError, match="batch norm|take block or none"):
        aq.torch.plan(module, "adamw", batch, training.loss, cluster=CLUSTER, recompute=asked)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda p: "lion", "not one of adamw, adam, sgd"),
        (lambda p: torch.optim.RMSprop(p), "the optimizer is RMSprop"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True is not known"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1), "dampening=0.1"),
        (lambda p: torch.optim.SGD(list(p)[:1]), "linear.bias is not updated"),
    ],
)
def test_optimizers_that_are_not_known_are_refused(optimizer, message):
    module = Odd("nothing")
    with pytest.raises(InputError, match=message):
        aq.torch.plan(
            module,
            optimizer(module.parameters()),
            {"x": torch.ones(4, 4)},
            lambda m, b: m(b["x"]).sum(),
            cluster=CLUSTER,
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_module_on_meta_is_planned_and_its_causal_mask_seen():
    class Masked(training.Language):
        def forward(self, tokens):
            x = self.embed(tokens)
            mask = torch.ones(12, 12, dtype=torch.bool, device=x.device).tril()[None, None]
            q, k, v = (self.layers[0][n](x).unflatten(-1, (4, 4)).transpose(1, 2) for n in "qkv")
            mask = mask.expand(len(x), -1, -1, -1)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return self.head(self.layers[0]["o"](y.transpose(1, 2).flatten(2)))

    with torch.device("meta"):
        module = Masked()
        batch = {n: torch.zeros(8, 12, dtype=torch.long) for n in ("inputs", "targets")}
    program = torch.export.export(module, (batch["inputs"],)).run_decompositions({})
    _drop_constant_masks(program)
    (attends,) = [n for n in program.graph.nodes if "attention" in n.name and n.args]
    assert attends.args[3:] == (None, 0.0, True)
    plan = aq.torch.plan(
        *(module, "adamw", batch, training.loss), cluster=CLUSTER, method=aq.Zero3Parallel()
    )
    assert plan.stages[0].shardings["state.params['embed.weight']"] != ((), ())


def test_micro_batches_are_traced_with_their_own_size(x64):
    module, batch = training.make("language")
    method = aq.DataParallel()
    plan = aq.torch.plan(
        *(module, "adamw", batch, training.loss),
        cluster=CLUSTER,
        method=method,
        num_micro_batches=2,
    )
    assert plan.num_micro_batches == 2
    made = aq.torch.training_step(module, "adamw", batch, training.loss)
    step = aq.parallelize(made.step, plan, devices=jax.devices()[:4])
    arrays = {key: x.numpy() for key, x in batch.items()}
    _, metrics = step(state_of(made, module), arrays)
    assert float(metrics["loss"]) == pytest.approx(training.loss(module, batch).item(), abs=1e-13)


def test_a_parameter_that_is_not_trained_is_not_updated(x64):
    module, batch = training.make("language")
    module.norm.weight.requires_grad_(False)
    made = aq.torch.training_step(module, "sgd", batch, training.loss)
    assert "norm.weight" not in made.state["params"] and "norm.weight" in made.state["buffers"]
    state = state_of(made, module)
    new, _ = jax.jit(made.step)(state, {key: x.numpy() for key, x in batch.items()})
    np.testing.assert_array_equal(new["buffers"]["norm.weight"], state["buffers"]["norm.weight"])
    assert np.any(new["params"]["norm.bias"] != state["params"]["norm.bias"])


def test_numbers_that_are_computed_narrower_stay_wide_in_the_state():
    module, batch = training.make("language")
    made = aq.torch.training_step(
        module.float(), "sgd", batch, training.loss, compute_dtype=torch.bfloat16
    )
    text = str(jax.make_jaxpr(made.step)(made.state, made.batch))
    assert {x.dtype.name for x in made.state["params"].values()} == {"float32"}
    products = [line for line in text.splitlines() if "= dot_general" in line]
    assert products and all("bf16" in line for line in products)


def test_a_plan_of_another_module_or_a_pipeline_is_refused():
    module, batch = training.make("language")
    with pytest.raises(InputError, match="split as one program"):
        aq.torch.plan(
            *(module, "sgd", batch, training.loss),
            cluster=CLUSTER,
            method=aq.Megatron(data=1, pipeline=2, tensor=2),
        )
    planned = aq.torch.plan(
        *(module, "sgd", batch, training.loss), cluster=CLUSTER, method=aq.DataParallel()
    )
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        with pytest.raises(PlanMismatchError) as error:
            aq.torch.apply(planned, training.make("images")[0])
    finally:
        torch.distributed.destroy_process_group()
    assert "parameter norms.0.weight is not in the plan" in str(error.value)
    assert "4 devices, and processes there are 1" in str(error.value)
