"""Losses of small modules: alone, or as one of several processes under plans.

`python split_training.py FOLDER RANK` is one of four processes: it trains the module of each plan
NAME.METHOD.json in the folder, and process 0 prints the losses as JSON.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

WORLD = 4
STEPS = 4


class Language(nn.Module):
    """A layer of attention between a tied embedding and its head; float64."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(16, 16) for n in "qkvo"}) for _ in range(2)
        )
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            y = self.norm(x)
            q, k, v = (layer[n](y).unflatten(-1, (4, 4)).transpose(1, 2) for n in "qkv")
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["o"](y.transpose(1, 2).flatten(2))
        return self.head(x)


class Images(nn.Module):
    """Convolutions with batch norms, and a buffer that does not change; float64."""

    def __init__(self):
        super().__init__()
        # Biases before a batch norm have gradients of zero, which Adam divides by their size.
        convolutions = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, bias=False))
        self.layers = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.head = nn.Linear(8, 4)
        self.register_buffer("shift", torch.full((8, 1, 1), 0.25))

    def forward(self, images):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            images = functional.relu(norm(layer(images))) + self.shift
        return self.head(functional.adaptive_avg_pool2d(images, 1).flatten(1))


class Block(nn.Module):
    """A layer that adds to its input what it makes of it, and counts how often it runs."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        Block.runs += 1
        return x + self.down(functional.gelu(self.up(x)))


class Blocks(nn.Module):
    """Layers that run as modules and can be computed again; float64."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODULES = {"language": Language, "images": Images, "blocks": Blocks}


def make(name):
    """A module and its batch, the same whenever it is asked for."""
    torch.manual_seed(0)
    module = MODULES[name]().double()
    if name != "images":
        inputs = torch.randint(0, 48, (8, 12))
        targets = torch.randint(0, 48, (8, 12))
    else:
        inputs = torch.randn(8, 3, 8, 8, dtype=torch.float64)
        targets = torch.randint(0, 4, (8,))
    return module, {"inputs": inputs, "targets": targets}


def loss(module, batch):
    """Mean cross-entropy."""
    logits = module(batch["inputs"])
    return functional.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())


def train(module, batch, whole=lambda own: own):
    """Losses of a few steps; `whole` makes that of the whole batch of a process's own."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        own = loss(module, batch)
        own.backward()
        optimizer.step()
        losses.append(whole(own).item())
    return losses


def main():
    import aliquot as aq

    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), WORLD)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    found = {}
    for path in sorted(folder.glob("*.json")):
        module, batch = make(path.name.partition(".")[0])
        applied = aq.torch.apply(aq.Plan.load(path), module)
        held = sum(p.to_local().numel() for p in module.parameters())
        Block.runs = 0
        losses = train(module, applied.local(batch), applied.loss)
        found[path.stem] = {"losses": losses, "held": held, "blocks": Block.runs}
    if rank == 0:
        print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main()
