"""Draws the pictures of the documentation, and notes of which page each is.

Run as a program, with a browser for Python: `make pictures`. A picture is the screenshot of a page that commands
write; beside it lies the digest of that page, by which a test finds pictures that are no longer today's.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from aliquot.cli._app import app
from aliquot.plans import Plan, mesh_picture

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
RENDER = Path(__file__).with_name("render.py")
# A plan with everything that a page can show, and methods compared.
COMMANDS = {
    "page": (
        "plan gpt-2.6b --scan --cluster 2x8xV100-16GB --global-batch 64 --recompute block --method megatron:tp4,pp4 --micro-batches 16 --out plan.json",
        "explain plan.json --no-alternatives --html page.html",
    ),
    "compare": (
        "compare gpt-1.3b --scan --cluster 8xH100 --global-batch 64 --recompute none --methods"
        " fsdp,zero2,ddp,tp:8 --html compare.html",
    ),
}
# A page says on which day it was written.
_DAY = re.compile(r"<div><dt>date</dt>.*?</div>")


# Pages are looked at on a phone, too, and on a wide screen.
NARROWER = (390, 1440)
MESH = "plan gpt-1.3b --scan --cluster 4x8xH100 --global-batch 64 --recompute none --method megatron:dp4,tp8,fsdp"


def mesh(folder):
    """The picture that the README opens with: a plan's mesh, and along which axis what is split."""
    path = Path(folder, "mesh.json")
    done = CliRunner().invoke(app, [*MESH.split(), "--out", str(path)])
    assert done.exit_code == 0, done.output
    return mesh_picture(Plan.load(path)) + "\n"


def page_of(name, folder):
    """The path of the page that a picture shows, written into a folder today."""
    for command in COMMANDS[name]:
        words = [
            str(Path(folder, word)) if word.endswith((".json", ".html")) else word
            for word in command.split()
        ]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    return Path(folder, f"{name}.html")


def digest(page):
    """Of a page, without what differs from run to run."""
    return hashlib.sha256(_DAY.sub("", page.read_text()).encode()).hexdigest()


def noted(name):
    """The digest of the page that a picture of the documentation shows."""
    return (PICTURES / f"{name}.sha256").read_text().strip()


def main():
    """Draw all of them."""
    with tempfile.TemporaryDirectory() as folder:
        (PICTURES / "mesh.svg").write_text(mesh(folder))
        for name in COMMANDS:
            page = page_of(name, folder)
            subprocess.run([sys.executable, str(RENDER), str(page)], check=True)
            shutil.copy(page.with_suffix(".png"), PICTURES)
            for width in NARROWER:
                subprocess.run(
                    [sys.executable, str(RENDER), "--width", str(width), str(page)], check=True
                )
                shutil.copy(page.with_suffix(".png"), PICTURES / f"{name}-{width}.png")
            (PICTURES / f"{name}.sha256").write_text(f"{digest(page)}\n")


if __name__ == "__main__":
    main()
