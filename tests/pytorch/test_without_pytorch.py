"""Without PyTorch, what needs it says what to install."""

import subprocess
import sys

CODE = """
import sys
sys.modules["torch"] = None
import aliquot as aq
try:
    aq.torch.plan
except aq.MissingExtraError as error:
    print(error)
"""


def test_what_needs_pytorch_says_what_to_install():
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "this needs torch, which is not installed" in said.stdout
    assert "[torch]" in said.stdout or "pip install torch" in said.stdout
