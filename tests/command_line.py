"""Running the command line in this process, and what every refusal looks like."""

import re
import sys

import jax
from typer.testing import CliRunner

from aliquot.cli import _voice
from aliquot.cli._app import app

# On a machine with much to do, every command would speak; the voice has tests of its own.
_voice.FIRST_S = 3600.0

TINY = (
    "gpt-125m --cluster 8xH100 --global-batch 8 --set num_layers=2 --set vocab_size=512 --set"
    " hidden_size=96 --attention plain".split()
)


def run(*args):
    """The result of `aliquot *args`, with its `exit_code`, `stdout` and `stderr`.

    Models in float64 turn 64 bits on for the whole process, which must not outlast the command.
    """
    before, typed = jax.config.jax_enable_x64, sys.argv
    sys.argv = ["aliquot", *map(str, args)]
    try:
        return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    finally:
        sys.argv = typed
        jax.config.update("jax_enable_x64", before)


def refused(found, *messages, code=2):
    """Assert that the command said no: nothing on standard output, all messages on standard error,
    no traceback.
    """
    assert found.exit_code == code, found.output
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    for message in messages:
        assert message in found.stderr, found.stderr


def without_waits(text):
    """Lines of standard error but for those which say that something takes long, as everything does
    on a machine with much to do.
    """
    return [line for line in text.splitlines() if not re.search(r" \.\.\. \d+ s$", line)]
