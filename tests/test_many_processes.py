"""The script of `docs/many-processes.md` runs in two terminals as it stands there."""

import re
from pathlib import Path

import pytest
from runtime.ports import coordinator_port
from runtime.processes import last_texts, started

PAGE = Path(__file__).parents[1] / "docs" / "many-processes.md"


@pytest.mark.slow
def test_two_terminals(tmp_path):
    text = PAGE.read_text()
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    commands = re.findall(r"```bash\n(.*?)\n```", text)
    assert commands == ["python two_processes.py 0", "python two_processes.py 1"]
    path = tmp_path / "two_processes.py"
    # Other tests use the machine as well.
    assert "127.0.0.1:12345" in script
    path.write_text(script.replace("127.0.0.1:12345", f"127.0.0.1:{coordinator_port()}"))
    with started(path, 2) as processes:
        first, second = last_texts(processes, 240)
    assert first == second
    losses = [
        float(found) for found in re.findall(r"^step \d: loss (\d\.\d{3})$", first, re.MULTILINE)
    ]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.5
