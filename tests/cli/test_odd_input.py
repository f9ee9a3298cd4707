"""What people type by mistake, and what their machines do to output: one or two lines, and an exit
code.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from command_line import refused, run, without_waits
from sample_plans import sample_pipeline, sample_plan

import aliquot as aq
from aliquot.plans import ModelReference

NINES = "9" * 5000
SMALL = "plan gpt-10m --cluster 8xH100 --global-batch 8"

FACTORY = """
import sys
import jax, jax.numpy as jnp
A = jax.ShapeDtypeStruct((8, 8), jnp.float32)
nothing = None
def leaves(): sys.exit(0)
def leaves_in_step():
    def step(state, batch): sys.exit(0)
    return step, A, A
def needs(width, depth, name="x"): pass
def unnamed(width, /): pass
def one_argument(): return (lambda state: state), A, A
def huge():
    large = jax.ShapeDtypeStruct((10**10, 10**12), jnp.float32)
    return (lambda state, batch: (state + batch.sum(), {})), large, A
def three_arguments(): return (lambda state, batch, key: state), A, A
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module with factories that are wrong in some way."""
    (tmp_path / "odd_factories.py").write_text(FACTORY)
    (tmp_path / "odd_exit.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "odd_none.py").write_text("import sys\nsys.modules[__name__] = None\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ("--batch-size 8", "Type --global-batch 64"),
        ("--batch=8", "Type --global-batch 64"),
        ("--gpus 8", "Type --cluster 8xH100"),
        ("--fsdp", "Type --method fsdp"),
        ("-tp 2", "Type --method tp:2"),
        ("--pipeline-model-parallel-size 2", "Type --method pipeshard --stages 4"),
        ("--gradient-accumulation-steps 4", "Type --micro-batches 4"),
        ("-o plan.json", "Type --out FILE"),
        ("--model gpt-10m", "Type the model itself, before the options"),
    ],
)
def test_options_of_other_tools_are_answered_with_those_of_this_one(options, instead):
    found = run(*SMALL.split(), *options.split())
    assert found.exit_code == 2
    assert f"There is no option {options.split('=')[0].split()[0]}. {instead}" in found.stderr


def test_other_names_are_left_alone_where_they_mean_nothing_else():
    # Behind `--` they are of another command; a verb without the option knows no better.
    assert "There is no option" not in run("cluster", "8xH100", "--batch-size", "8").stderr
    assert "There is no option" not in run("launch", "local:0", "--", "x", "--batch-size").stderr


def test_more_devices_than_a_host_has_are_said_to_be_several_hosts():
    found = run("cluster", "64xH100")
    assert found.exit_code == 0 and found.stdout.startswith("8x8xH100: 8 hosts x 8 devices")
    assert found.stderr == "64xH100 is taken as 8x8xH100: no host has so many H100.\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (f"{SMALL} --memory-limit 40", "--memory-limit 40 has no unit: write 40GiB"),
        (f"{SMALL} --method pipeshard --micro-batches --2", "'--2' is neither a number nor auto"),
        (f"{SMALL} --method pipeshard --micro-batches {NINES}", "is neither a number nor auto"),
        (f"{SMALL} --method pipeshard --layers --5", "'--5' is neither a number nor a pattern"),
        (f"{SMALL} --method pipeshard --layers {NINES}", "is neither a number nor a pattern"),
        (f"{SMALL} --mesh {NINES}x2", "is no mesh"),
        (f"{SMALL} --set num_layers={NINES}", "is not a whole number"),
        (f"{SMALL} --set num_layers=99999999", "num_layers=99999999 must be at most 10000"),
        (f"{SMALL} --set seq_len=99999999999999999999", "must be at most 2147483647"),
        (
            "plan gpt-10m --cluster 8xH100 --global-batch 99999999999999999999",
            "must be at most 2147483647",
        ),
        (
            (
                "plan gpt-10m --cluster 8xH100 --global-batch 2147483640 --set seq_len=2147483640"
                " --set num_layers=1"
            ),
            "elements, and can have 9.0e+15",
        ),
        (f"{SMALL} --out {'a' * 300}", "cannot be written: File name too long"),
        (f"{SMALL} --out {'a' * 5000}", "cannot be written: File name too long"),
        (f"explain {'a' * 5000}", "cannot be read: File name too long"),
        (f"cluster {NINES}xH100", "a cluster has at most 1000000 devices"),
        (f"cluster {'a' * 5000}", "there is no device"),
        ("cluster 99999999999xH100", "more than the 1000000 that a cluster may have"),
        ("cluster v5e-99999999996", "more than the 1000000 that a cluster may have"),
        (
            f"{SMALL.replace('8xH100', '4x99999999xH100')}",
            "more than the 1000000 that a cluster may have",
        ),
    ],
    ids=lambda text: text[-60:],
)
def test_numbers_and_names_beyond_all_measure(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    found = run(*args.split())
    refused(found, message)
    assert len(found.stderr.splitlines()) <= 2
    assert max(map(len, found.stderr.splitlines())) <= 1000
    assert time.process_time() - started < 20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("odd_factories:leaves", "it ends the process with sys.exit(0) and returns nothing"),
        (
            "odd_factories:leaves_in_step",
            "it ends the process with sys.exit(0) and returns nothing",
        ),
        ("odd_exit:factory", "cannot be imported: it ends the process with sys.exit(0)"),
        ("odd_none:factory", "has no 'factory'"),
        ("odd_factories:nothing", "is NoneType None, not a function"),
        ("odd_factories:needs", "it needs width, depth: add --set width=... --set depth=..."),
        ("odd_factories:unnamed", "it needs arguments without names"),
        (
            "odd_factories:huge",
            "the step has an array float32[10000000000, 1000000000000], of 1.0e+22 elements",
        ),
        ("odd_factories:one_argument", "cannot be called as train_step(state, batch): too many"),
        (
            "odd_factories:three_arguments",
            "cannot be called as train_step(state, batch): missing a required argument",
        ),
    ],
)
def test_factories_that_make_no_step(module, tmp_path, name, message):
    found = run(
        "plan", name, "--cluster", "8xH100", "--method", "dp", "--out", tmp_path / "plan.json"
    )
    refused(found, message)
    assert len(found.stderr.splitlines()) <= 2
    assert not (tmp_path / "plan.json").exists()


def test_a_setting_that_the_factory_does_not_take(module):
    found = run(*"plan odd_factories:needs --cluster 8xH100 --set width=1 --set depht=2".split())
    refused(found, "it has no argument 'depht': did you mean 'depth'", "it needs depth")


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"global_batch": -8}, ["global_batch=-8 must be at least 1"]),
        ({"global_batch": "8"}, ["global_batch='8' is not a whole number"]),
        ({"model": ["gpt-10m"]}, ["is not a name or the fields of a configuration"]),
        ({"model": "gpt-125m"}, ["they are of 'gpt-125m'"]),
        ({"overrides": {"num_layers": [1]}}, ["num_layers=[1] is not a whole number"]),
        ({"overrides": {"name": "x"}}, ["it has no field 'name'"]),
        (
            {"global_batch": 0, "scan": "no", "learning_rate": -1, "dtype": "int8", "colour": 1},
            [
                "5 problems",
                "global_batch=0",
                "scan='no'",
                "learning_rate=-1",
                "no dtype 'int8'",
                "no setting 'colour'",
            ],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "verb", ["explain {}", "verify {} --target cpu", "train gpt-10m --data {} --plan {} --steps 1"]
)
def test_edited_settings_are_refused_all_at_once(settings, messages, verb, tmp_path):
    path = tmp_path / "plan.json"
    model = ModelReference(
        kind="zoo", name="gpt-10m", settings={"model": "gpt-10m", "global_batch": 8, **settings}
    )
    sample_plan(model=model).save(path)
    found = run(
        *verb.replace("{}", str(path)).split(),
        *(["--devices", "8"] if verb.startswith("train") else []),
    )
    refused(found, "the plan's settings of gpt-10m cannot be used", *messages)
    assert len(found.stderr.splitlines()) <= 12


def test_settings_of_another_step_than_the_plans_are_refused(tmp_path):
    sample_plan().save(tmp_path / "plan.json")
    refused(
        run("explain", tmp_path / "plan.json"),
        "the plan was made for another step",
        "add --no-alternatives",
    )


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("ddp", aq.DataParallel()),
        ("fsdp", aq.Zero3Parallel()),
        ("hsdp", aq.Zero3Parallel(shard_within="host")),
    ],
)
def test_methods_by_the_names_of_other_libraries(name, method):
    from aliquot.planners import method_by_name

    assert method_by_name(name) == method


@pytest.mark.parametrize(
    ("name", "own"), [("bfloat16", "bf16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_dtypes_by_the_names_of_other_libraries(name, own):
    from aliquot.zoo import build

    assert build("gpt-10m", 8, overrides={"num_layers": 1}, dtype=name).settings["dtype"] == own


def _command(*args, **environment):
    """A process of the command line."""
    command = [sys.executable, "-m", "aliquot", *map(str, args)]
    return command, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize(
    "args", ["cluster 8xH100", "cluster 8xH100 --json", "--help", "diff {0} {0}"]
)
def test_standard_output_on_a_full_disk(args, tmp_path):
    sample_plan().save(tmp_path / "plan.json")
    command, environment = _command(*args.format(tmp_path / "plan.json").split())
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert (
        done.stderr
        == "error: the answer cannot be written to standard output: No space left on device.\n"
    )
    assert done.returncode == 2


def test_a_terminal_that_knows_only_ascii(tmp_path):
    sample_pipeline().save(tmp_path / "plan.json")
    sample_plan(notes=("größer 日本",)).save(tmp_path / "other.json")
    command, environment = _command(
        "diff",
        tmp_path / "plan.json",
        tmp_path / "other.json",
        "--all",
        PYTHONIOENCODING="ascii",
        JAX_PLATFORMS="cpu",
    )
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode("ascii")
    assert "gr\\xf6\\xdfer \\u65e5\\u672c" in text and "\\u2500" not in text


def test_an_unknown_platform():
    command, environment = _command("cluster", "detect", JAX_PLATFORMS="abacus")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert (
        "JAX cannot start" in done.stderr and "JAX_PLATFORMS is 'abacus': unset it" in done.stderr
    )
    assert len(without_waits(done.stderr)) == 2


def test_control_characters_are_written_as_escapes(tmp_path):
    path = tmp_path / "plan.json"
    sample_plan(method="a\x1b[2Jb", notes=("c\x9bd\u202ee",)).save(path)
    for args in (
        "explain {} --no-alternatives",
        "explain {} --no-alternatives --json",
        "diff {} {}",
    ):
        found = run(*args.replace("{}", str(path)).split())
        assert found.exit_code == 0
        assert not set("\x1b\x9b\u202e") & set(found.stdout + found.stderr)
    path.write_text(path.read_text().replace('"version"', '"ver\\u001bsion"'))
    found = run("explain", path)
    refused(found)
    assert "\x1b" not in found.stderr


@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.4, 0.8, 1.2])
def test_ctrl_c_while_modules_are_imported(after_s):
    # The line is written once Ctrl-C is this package's.
    code = (
        "import aliquot.cli._interrupts as i; i.leave_at_interrupts(); print('ready', flush=True); "
    )
    code += "from aliquot.cli import main; main()"
    _, environment = _command()
    command = [
        sys.executable,
        "-c",
        code,
        "plan",
        "gpt-125m",
        "--cluster",
        "8xH100",
        "--global-batch",
        "64",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted" in said and "Traceback" not in said and len(without_waits(said)) <= 2


def test_ctrl_c_is_acknowledged_while_python_does_not_look():
    code = """
import hashlib, aliquot.cli._interrupts as i
i.leave_at_interrupts()
i.raise_at_interrupts()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
    _, environment = _command()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", code], text=True, env=environment, **pipes
    ) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith(
            "interrupted: ending what is under way. Press Ctrl-C again"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


def test_a_plugin_without_its_device_is_told_of_in_one_line(tmp_path):
    plugin = tmp_path / "jax_plugins" / "of_a_gpu_that_is_not_here"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(
        "def initialize(): raise RuntimeError('Unable to load CUDA.\\nReally.')\n"
    )
    command, environment = _command("cluster", "detect")
    environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"}
    environment.pop("JAX_PLATFORMS")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "of_a_gpu_that_is_not_here" in line]
    assert (
        len(said) == 1
        and "cannot start (RuntimeError: Unable to load CUDA.), so JAX goes on without it"
        in said[0]
    )
    assert "Traceback" not in done.stderr and len(without_waits(done.stderr)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "a = " + "9" * 5000,
        "a = 1\n" * 2,
        "\x00",
        "x = 1\n" * 500_000,
        '"\\u001b[2J" = 1',
    ],
)
def test_odd_cluster_files(text, tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(text)
    found = run("cluster", path)
    refused(found, "lab.toml")
    assert len(found.stderr.splitlines()) <= 12 and "\x1b" not in found.stderr
