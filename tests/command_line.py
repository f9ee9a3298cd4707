"""Running the command line in this process, and what every refusal looks like."""

from typer.testing import CliRunner

from aliquot.cli._app import app

TINY = "gpt-125m --cluster 8xH100 --global-batch 8 --set num_layers=2 --set vocab_size=512 --set hidden_size=96".split()


def run(*args):
    """The result of `aliquot *args`, with its `exit_code`, `stdout` and `stderr`."""
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)


def refused(found, *messages, code=2):
    """Assert that the command said no: nothing on standard output, all messages on standard error, no traceback."""
    assert found.exit_code == code, found.output
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    for message in messages:
        assert message in found.stderr, found.stderr
