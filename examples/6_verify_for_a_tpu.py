"""Compile a plan for sixteen TPU chips that are not here, and compare it with the prediction.

    pip install -e '.[zoo,verify-tpu]'
    python examples/6_verify_for_a_tpu.py

The compiler is libtpu, which needs no TPU. Without it, the script says what to install.
"""

import sys

import jax

import aliquot as aq
from aliquot import report, zoo
from aliquot.verification import CompilerMissingError

jax.config.update("jax_platforms", "cpu")  # libtpu runs in a process of its own

# A narrow Llama of two layers in bfloat16, with 32 sequences of 1024 tokens.
sizes = {"num_layers": 2, "hidden_size": 1024, "ffn_size": 2816, "num_heads": 8, "num_kv_heads": 8}
work = zoo.build("llama-7b", 32, overrides={**sizes, "seq_len": 1024}, dtype="bf16")
arguments = (work.train_step, work.state, work.batch)

plan = aq.plan(*arguments, cluster=aq.Cluster.preset("v5e-16"))
print(plan)

try:
    verified = aq.verify(plan, *arguments)
except CompilerMissingError as error:
    sys.exit(f"Not verified. {error}")
print(report.as_text(report.verification(verified.to_dict())))
