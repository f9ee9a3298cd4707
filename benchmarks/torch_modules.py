"""Are steps of PyTorch modules predicted like the zoo's equal models?

    python benchmarks/torch_modules.py

Models of `transformers` of the same configuration, on `meta`, beside those that `aliquot.zoo` makes
of it: predicted step time and memory under data parallelism and ZeRO-3 on 8 H100, in bfloat16 with
AdamW, nothing recomputed. Then the time to export and plan a Llama-7B of 32 layers. Needs PyTorch
and transformers.
"""

import resource
import time

import torch
import transformers

import aliquot as aq
from aliquot.zoo import build, from_config

SEQ_LEN = 1024
METHODS = {"dp": aq.DataParallel(), "zero3": aq.Zero3Parallel()}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
# Class, settings besides the defaults, and the batch.
CASES = {
    "GPT-2 (4 layers)": ("GPT2LMHead", {"n_layer": 4, **NO_DROPOUT}, 64),
    "Llama-7B (2 layers)": ("LlamaForCausalLM", {"num_hidden_layers": 2}, 32),
    "Mistral-7B (2 layers)": ("MistralForCausalLM", {"num_hidden_layers": 2}, 32),
    "Qwen 2 (2 layers)": ("Qwen2ForCausalLM", {"num_hidden_layers": 2}, 32),
    "Qwen 3 (2 layers)": ("Qwen3ForCausalLM", {"num_hidden_layers": 2}, 32),
}


def make(name, settings, batch):
    """A model on `meta`, its batch, and its configuration."""
    family = name.removesuffix("LMHead").removesuffix("ForCausalLM")
    config = getattr(transformers, f"{family}Config")(**settings, use_cache=False)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}LMHeadModel" if "LMHead" in name else name)(config)
        ids = torch.zeros(batch, SEQ_LEN, dtype=torch.long)
    return model.train(), {"input_ids": ids, "labels": ids.clone()}, config


def main():
    cluster = aq.Cluster.preset("8xH100")
    bf16 = {"cluster": cluster, "compute_dtype": torch.bfloat16, "num_micro_batches": 1}
    print("| model | method | step, torch | zoo | | memory, torch | zoo | |")
    print("|---|---|---|---|---|---|---|---|")
    for title, (name, settings, batch) in CASES.items():
        model, inputs, config = make(name, settings, batch)
        zoo = build(
            from_config(config.to_dict(), seq_len=SEQ_LEN),
            batch,
            dtype="bf16",
            attention="auto",
            device=cluster.device,
            recompute="none",
        )
        for key, method in METHODS.items():
            ours = aq.torch.plan(model, "adamw", inputs, method=method, **bf16).prediction
            step = (zoo.train_step, zoo.state, zoo.batch)
            theirs = aq.plan(*step, cluster=cluster, method=method, num_micro_batches=1).prediction
            both = [
                (1e3 * ours.step_time_s, 1e3 * theirs.step_time_s, "ms"),
                (ours.peak_memory_bytes / 2**30, theirs.peak_memory_bytes / 2**30, "GiB"),
            ]
            cells = [f"{a:.2f} {unit} | {b:.2f} {unit} | {a / b - 1:+.1%}" for a, b, unit in both]
            print(f"| {title} | {key} | {' | '.join(cells)} |", flush=True)
    started = time.process_time()
    model, inputs, _ = make("LlamaForCausalLM", {"num_hidden_layers": 32}, 32)
    plan = aq.torch.plan(model, "adamw", inputs, method=METHODS["zero3"], **bf16)
    spent, used = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"\nLlama-7B of 32 layers, exported and planned with ZeRO-3: {spent:.1f} CPU s,"
        f" {used / 2**20:.2f} GiB of memory; {plan.prediction.peak_memory_bytes / 2**30:.1f} GiB"
        " predicted on each device."
    )


if __name__ == "__main__":
    main()
