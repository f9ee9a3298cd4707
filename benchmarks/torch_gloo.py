"""Do modules that are split as plans say train as one process does?

    python benchmarks/torch_gloo.py [MODEL ...]

Small models of `transformers` in float64, six steps of AdamW on 4 processes (gloo, CPUs) under five
plans each; the largest difference of a loss from that of one process. Needs PyTorch and
transformers.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

import aliquot as aq

WORLD = 4
STEPS = 6
METHODS = {
    "dp": aq.DataParallel(),
    "zero3": aq.Zero3Parallel(),
    "hsdp": aq.Zero3Parallel(shard_within=2),
    "dp2 x tp2": aq.TensorParallel(degree=2),
    "ILP": aq.ShardParallel(),
}
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {**LAYERS, "vocab_size": 96, "max_position_embeddings": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
# Classes of the configuration and the model, and settings.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", "LMHeadModel", {**GPT2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
    "Llama": ("Llama", "ForCausalLM", {**TEXT, "num_key_value_heads": 2}),
    "BERT": ("Bert", "ForMaskedLM", {**TEXT, **NO_DROPOUT}),
    "ViT": (
        "ViT",
        "ForImageClassification",
        {**LAYERS, **NO_DROPOUT, "image_size": 32, "patch_size": 8, "num_labels": 8},
    ),
    "ResNet": (
        "ResNet",
        "ForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    ),
}


def make(name):
    """A model and its batch, the same in all processes."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    family, kind, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}{kind}")(config).train()
    if "Image" in kind:
        batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 2, (8,))}
    else:
        batch = {key: torch.randint(0, 96, (8, 16)) for key in ("input_ids", "labels")}
    return model, batch


def loss(model, batch):
    """Mean cross-entropy; that of transformers is float32 whatever the model is."""
    given = {key: x for key, x in batch.items() if key != "labels"}
    logits = model(**given).logits
    return functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def train(model, batch, whole=lambda own: own):
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        own = loss(model, batch)
        own.backward()
        optimizer.step()
        losses.append(whole(own).item())
    return losses


def worker(rank, folder, cases):
    """One process: prints a row for each plan."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for name, key, path, alone in cases:
        model, batch = make(name)
        applied = aq.torch.apply(aq.Plan.load(path), model)
        found = train(model, applied.local(batch), applied.loss)
        apart = max(abs(a - b) for a, b in zip(found, alone))
        if rank == 0:
            print(
                f"| {name} | {key} | {apart:.1e} | {alone[0]:.4f} -> {alone[-1]:.4f} |", flush=True
            )
    torch.distributed.destroy_process_group()


def main():
    names = sys.argv[1:] or list(MODELS)
    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for name in names:
            for number, (key, method) in enumerate(METHODS.items()):
                model, batch = make(name)
                path = Path(folder) / f"{name}-{number}.json"
                aq.torch.plan(
                    *(model, "adamw", batch, loss),
                    cluster=aq.Cluster.preset("4xcpu"),
                    method=method,
                    num_micro_batches=1,
                ).save(path)
                cases.append((name, key, path, None))
            alone = train(*make(name))
            cases = [(*c[:3], alone) if c[0] == name else c for c in cases]
        print("| model | plan | largest difference | loss |\n|---|---|---|---|", flush=True)
        torch.multiprocessing.spawn(worker, (folder, cases), nprocs=WORLD)


if __name__ == "__main__":
    main()
