r"""Is the predicted memory of steps that keep arrays in host memory what the compiler assigns?

Steps of a GPT-like model whose layers run in a scan (or are written out) offload activations by a
policy of `jax.checkpoint`, or keep the optimizer's moments in host memory. Each is planned for
eight devices, compiled for that device without having one, and both accounts are put side by side:
device memory and host memory of each device. Times of copies are predictions; the compiler's
program says which of them are asynchronous.

Needs the wheels of `jax-cuda12-plugin`, `jax-cuda12-pjrt` and `nvidia-cuda-nvcc-cu12`, or of
`libtpu`, on `PYTHONPATH`.

    python benchmarks/offload_deviceless.py [--quick] [--devices H100 v5p] [--policies names ...]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from _results import Report, options, say

CLUSTERS = {"H100": "8xH100", "v5p": "v5p-16"}
POLICIES = ("names", "dots", "moments", "names and moments")
METHODS = ("dp", "zero3")
LIMIT = 0.10
# Layers, width, heads, length of a sequence, sequences of a batch, vocabulary. Activations dominate
# with the policies that offload these, the optimizer's moments in the others.
SHAPES = {
    "activations": (8, 1024, 16, 1024, 64, 8192),
    "state": (8, 2048, 16, 256, 8, 8192),
}


def main() -> int:
    """Run, and write or print the answer."""
    chosen = options(__doc__, _more)
    if chosen.case:
        print(json.dumps(_figures(json.loads(chosen.case))), flush=True)
        return 0
    report = Report(
        name="offload_deviceless",
        question="Predicted against compiled memory of steps that keep arrays in host memory",
        bar=f"device memory and host memory of every plan within {100 * LIMIT:.0f} %",
        method=(
            "Bytes on each of 8 devices, and in host memory for each: the plan's prediction, and"
            " the compiler's report of the buffers it assigned. Policies: `names`,"
            " save_and_offload_only_these_names on five arrays of each scanned layer; `dots`,"
            " offload_dot_with_no_batch_dims; `moments`, both of Adam's moments in pinned host"
            " memory, copied in and out by jax.device_put. Nothing was fitted but the rules that"
            " the compilers' schedules show. One run each."
        ),
    )
    cases = [
        {"device": device, "policy": policy, "method": method}
        for device in chosen.devices
        for policy in chosen.policies
        for method in chosen.methods
    ]
    rows = []
    for case in cases[: 1 if chosen.quick else None]:
        rows.append({**case, **_in_process(case, chosen.timeout)})
        say(" ".join(f"{k}={v}" for k, v in rows[-1].items()))
    errors = [
        abs(row[name])
        for row in rows
        for name in ("device error", "host error")
        if row.get(name) is not None
    ]
    report.summary = {
        "plans": len(rows),
        "not compiled": sum("outcome" in row for row in rows),
        "median error": statistics.median(errors) if errors else None,
        "worst error": max(errors, default=None),
    }
    report.tables = {"Plans": rows}
    met = bool(errors) and max(errors) <= LIMIT and not report.summary["not compiled"]
    return report.finish(chosen, met=met)


def _more(parser: Any) -> None:
    parser.add_argument("--devices", nargs="+", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one plan")
    parser.add_argument("--case", default="", help="one combination as JSON; prints its figures")


def _in_process(case: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Figures of one combination, from a process of its own: platforms stay in a process."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--case", json.dumps(case)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": f"not compiled in {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines() or ["no message"]
        return {"outcome": said[-1][:200]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _figures(case: dict[str, Any]) -> dict[str, Any]:
    """Plan one combination, compile the plan, and compare."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import aliquot as aq

    step, state, batch = _step(case["policy"])
    method = {"dp": aq.DataParallel(), "zero3": aq.Zero3Parallel()}[case["method"]]
    cluster = aq.Cluster.preset(CLUSTERS[case["device"]])
    plan = aq.plan(step, state, batch, cluster=cluster, method=method)
    verified = aq.verify(plan, step, state, batch)
    (stage,) = verified.stages
    p = plan.prediction
    on_host = sum(p.host_memory_bytes.values())
    compiled_host = stage.compiled.host_bytes
    return {
        "device MiB, predicted": p.peak_memory_bytes / 2**20,
        "device MiB, compiled": stage.compiled_bytes / 2**20,
        "device error": p.peak_memory_bytes / stage.compiled_bytes - 1,
        "host MiB, predicted": on_host / 2**20,
        "host MiB, compiled": compiled_host / 2**20,
        "host error": on_host / compiled_host - 1 if compiled_host else None,
        "step ms": 1e3 * p.step_time_s,
        "copies ms": 1e3 * p.host_transfer_s,
        "of them beside compute ms": 1e3 * p.host_hidden_s,
        "predicted parts, MiB": {k: round(v / 2**20, 1) for k, v in p.memory_bytes.items()},
    }


def _step(policy: str) -> tuple[Any, Any, Any]:
    """A GPT-like step with Adam, and shapes of its state and batch."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    layers, width, heads, length, batch, words = SHAPES[
        "state" if policy == "moments" else "activations"
    ]
    policies = jax.checkpoint_policies
    offload = {
        "names": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["q", "k", "v", "o", "up"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        "dots": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        "moments": policies.nothing_saveable,
    }
    offload["names and moments"] = offload["names"]
    keeps_moments = policy.endswith("moments")
    narrow = jnp.bfloat16

    def normed(x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def layer(w: Any, x: Any) -> Any:
        h = normed(x)
        q, k, v = (
            checkpoint_name((h @ w[i].astype(narrow)).reshape(*h.shape[:2], heads, -1), i)
            for i in "qkv"
        )
        scores = jnp.einsum("bshd,bthd->bhst", q, k) / (width // heads) ** 0.5
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32))
        mixed = jnp.einsum("bhst,bthd->bshd", weights.astype(narrow), v).reshape(h.shape)
        x = x + checkpoint_name(mixed @ w["o"].astype(narrow), "o")
        up = checkpoint_name(normed(x) @ w["up"].astype(narrow), "up")
        return x + jax.nn.gelu(up) @ w["down"].astype(narrow)

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embedding"].astype(narrow)[tokens]
        block = jax.checkpoint(layer, policy=offload[policy])
        x, _ = jax.lax.scan(lambda x, w: (block(w, x), None), x, params["layers"])
        logits = (x @ params["embedding"].T.astype(narrow)).astype(jnp.float32)
        likely = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -likely.mean()

    def train_step(state: Any, tokens: Any) -> Any:
        params, moments = state["params"], state["moments"]
        if keeps_moments:
            moments = jax.device_put(moments, jax.memory.Space.Device)
        value, grads = jax.value_and_grad(loss)(params, tokens)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["first"], grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments["second"], grads)
        params = jax.tree.map(
            lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, first, second
        )
        moments = {"first": first, "second": second}
        if keeps_moments:
            moments = jax.device_put(moments, jax.memory.Space.Host)
        return {"params": params, "moments": moments}, {"loss": value}

    square, wide = (layers, width, width), (layers, width, 4 * width)
    shapes = {
        "embedding": (words, width),
        "layers": dict.fromkeys(("q", "k", "v", "o"), square)
        | {"up": wide, "down": (layers, 4 * width, width)},
    }

    def arrays(kind: str | None) -> Any:
        place = None
        if kind:
            place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place),
            shapes,
            is_leaf=lambda shape: isinstance(shape, tuple),
        )

    kind = "pinned_host" if keeps_moments else None
    state = {"params": arrays(None), "moments": {"first": arrays(kind), "second": arrays(kind)}}
    return train_step, state, jax.ShapeDtypeStruct((batch, length), jnp.int32)


if __name__ == "__main__":
    sys.exit(main())
