"""Ways in which one of several processes may differ from the others, how all must end, and how they
did.
"""

import json
import re
import subprocess
from pathlib import Path

from runtime.processes import started

WORKER = Path(__file__).parent / "differ_worker.py"
#: The step at which process 1 differs where it does so in the middle, and how many there are.
STEP, NUM_STEPS = 5, 12

# What each message must say beside the number of the process.
KINDS = {
    # Settings.
    "other generator of random numbers": ["jax_default_prng_impl = rbg"],
    "other random bits": ["jax_threefry_partitionable = False"],
    "64 bits": ["jax_enable_x64 = True"],
    "other precision of products": ["jax_default_matmul_precision = bfloat16"],
    "other precision in a context": ["jax_default_matmul_precision = bfloat16"],
    "other offset of seeds": ["jax_random_seed_offset = 7"],
    "other options of XLA": ["--xla_cpu_enable_fast_math = true (in XLA_FLAGS)"],
    # The function that makes the state.
    "other init function": ["in what it calls in step.init", "differ_worker.py"],
    "other key": ["argument [0] of step.init", "key<fry>[]", "beginning 0, 0", "beginning 0, 1"],
    "other array held by init": ["arrays that the function given to step.init holds", "2.0, 2.0"],
    "other number for init": [
        "argument [1] of step.init = 0.25",
        "argument [1] of step.init = 0.5",
    ],
    "no init": ["step.init", "compiling train_step"],
    # The step and its plan.
    "other model": ["operators in its traced step", "tanh of", "sin of", "differ_worker.py"],
    "other learning rate": ["operators in its traced step", "mul of 0.1,", "mul of 0.2,"],
    "other weight decay": ["operators in its traced step", "mul of 0.01,", "mul of 0.02,"],
    "other array held by the step": ["arrays that its step holds", "beginning 2.0, 2.0"],
    "other plan": ["decisions in its plan", "num_micro_batches = "],
    "batches of another shape": ["decisions in its plan", "(32, 16)"],
    # Batches.
    "other batches": ["batch.x", "float32[16, 16]"],
    "another batch once": ["call 6 of train_step", "batch.x", "float32[16, 16]"],
    "half a batch once": ["batch.x", "8, 16"],
    "a batch of another dtype once": ["batch.x is float16, planned float32"],
    "a batch left out": ["batch.x", "float32[16, 16]"],
    "NaN in a batch once": ["batch.y", "nan"],
    "another scalar once": ["rate_of_step", "float32[] beginning 1.0", "float32[] beginning 0.5"],
    "another permutation of rows once": ["batch.x", "float32[16, 16]"],
    # The state.
    "other restored arrays": ["layers[0]", "float32[16, 16]"],
    "another state on the devices": ["layers[0]", "float32[16, 16]"],
    "restored alone": ["a state from the host, such as layers[0]"],
    "one array restored alone": ["a state from the host, such as layers[1]"],
    # The order of calls.
    "stops early": ["the end of its run", "train_step"],
    "one step more": ["the end of its run", "train_step"],
    "another step in between": ["goes on with", "eval_step"],
    "other order of steps": ["goes on with", "eval_step"],
    "fails alone": ["InputError", "a fault"],
}
# States on devices are in pieces that no two processes share.
_PROGRAM_ONLY = {"another state on the devices"}
CASES = [
    (runtime, kind)
    for runtime in ("program", "pipeline")
    for kind in KINDS
    if runtime == "program" or kind not in _PROGRAM_ONLY
]
#: What may differ: all end well, with the same losses.
HARMLESS = (
    "nothing",
    "other debugging",
    "other number of devices asked for",
    "batches in another order of memory",
    "batches in 64 bits",
    "batches on a device",
)


def run_case(runtime, kind, limit_s=300):
    """Exit codes, what each process printed, and what it said on standard error."""
    with started(WORKER, 2, runtime, json.dumps(kind)) as processes:
        said = []
        for process in processes:
            try:
                said.append(process.communicate(timeout=limit_s))
            except subprocess.TimeoutExpired:
                process.kill()
                said.append(process.communicate())
    return {
        "codes": [process.returncode for process in processes],
        "printed": [out for out, _ in said],
        "errors": [error for _, error in said],
    }


def late_steps(found):
    """How many steps the processes ended from the fault on, at most."""
    before = found["printed"][1].partition("FAULT")[0]
    return max(len(losses(out)) for out in found["printed"]) - len(losses(before))


def losses(printed):
    """The losses of all steps that a process printed."""
    return re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)


def message_of(found, process):
    """The message with which a process ended, on one line."""
    text = found["errors"][process]
    begin = max(text.rfind("PlanMismatchError: "), text.rfind("aliquot: "))
    return re.sub(r"\s+", " ", text[max(begin, 0) :])


def wrong(kind, found):
    """What is wrong with how a case ended, or nothing."""
    if any(code not in (1, 3) for code in found["codes"]):
        return f"exit codes {found['codes']}"
    for process in (0, 1):
        said = re.sub(r"\s+", " ", found["errors"][process])
        words = list(KINDS[kind])
        # A process that fails shows its own error.
        if process == 0 or kind != "fails alone":
            words.append("process 1")
        missing = [word for word in words if word not in said]
        if missing:
            return f"process {process} does not say {missing}"
        if "jax.errors" in said or "XlaRuntimeError" in said or "JaxRuntimeError" in said:
            return f"process {process} shows an error of JAX"
    if late_steps(found) > 1:
        return f"{late_steps(found)} steps after the fault"
    return ""
