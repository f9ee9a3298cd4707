"""What a compiler's words say: that a program is too big, and by how much, or that it fails."""

from pathlib import Path

import pytest
from verify.verdicts import TARGET

from aliquot.verification._process import _refused

MESSAGES = {
    "RESOURCE_EXHAUSTED: Out of memory. Used 93.5G of 80.0G hbm.": 93.5 * 2**30,
    "RESOURCE_EXHAUSTED: Ran out of memory: requires 512.0M of 256M": 512 * 2**20,
    "RESOURCE_EXHAUSTED: total hbm usage >= 1.50T of 16.00G": 1.5 * 2**40,
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_program_that_is_too_big_says_what_it_needs(message, tmp_path):
    answer = _refused("XlaRuntimeError", f"{message}\nmore", "", TARGET, tmp_path / "report.txt")
    assert answer == {"refusal": message, "needed_bytes": MESSAGES[message]}


def test_other_errors_are_written_down(tmp_path):
    report = tmp_path / "folder" / "report.txt"
    with pytest.raises(Exception, match="does not compile for .*INTERNAL: no such thing"):
        _refused("XlaRuntimeError", "INTERNAL: no such thing", "all words", TARGET, report)
    assert "all words" in Path(report).read_text()
