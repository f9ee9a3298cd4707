"""What plugins say while JAX loads them."""

import subprocess
import sys

SCRIPT = """
import os
from aliquot.cli._devices import _without_remarks_on_gpus

with _without_remarks_on_gpus():
    os.write(2, b"heard\\nI0000 cudart_stub.cc:31] Could not find cuda drivers on your machine\\n")
    raise ValueError("wrong")
"""


def test_remarks_on_gpus_are_kept_back_and_nothing_else_is():
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True).stderr
    assert said.startswith("heard\n") and "ValueError: wrong" in said
    assert "cuda drivers" not in said
