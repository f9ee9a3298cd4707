"""`pytest --report DIR` writes what the tests that ran recorded as tables, like a benchmark's.

A test records a row with the fixture `row`, before it asserts anything. What its table answers
stands beside the test, in `REPORT` of its module: `name` (of the files), `question`, `bar` and
`method` as in benchmarks, and `largest`, the columns whose largest numbers the summary says.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_PROPERTY = "row of a report"


def pytest_addoption(parser):
    parser.addoption(
        "--report",
        dest="report_folder",
        metavar="DIR",
        type=Path,
        help="write tables of the tests that ran into this folder",
    )


def pytest_configure(config):
    # Workers of xdist send what they record to the process that started them.
    if config.getoption("report_folder") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Tables(config))


@pytest.fixture
def row(request, record_property):
    """Records a row of the table with a title: `row("Cases", case=name, seconds=0.1)`."""

    def record(title, /, **columns):
        found = {"about": request.module.REPORT, "title": title, "columns": columns}
        # As text, since workers send plain values alone.
        record_property(_PROPERTY, json.dumps(found))

    return record


class _Tables:
    """Collects rows, and writes the tables of each report at the end."""

    def __init__(self, config):
        self._folder = config.invocation_params.dir / config.getoption("report_folder")
        self._command = ["pytest", *map(str, config.invocation_params.args)]
        self._about, self._rows = {}, defaultdict(list)
        # Test functions of each report, with what became of all cases of each function.
        self._functions = defaultdict(set)
        self._failed, self._seconds = defaultdict(set), defaultdict(float)

    def pytest_runtest_logreport(self, report):
        function = report.nodeid.partition("[")[0]
        self._seconds[function] += report.duration
        if report.failed:
            self._failed[function].add(report.nodeid)
        texts = [text for name, text in report.user_properties if name == _PROPERTY]
        for found in map(json.loads, texts if report.when == "call" else []):
            name = found["about"]["name"]
            self._about[name] = found["about"]
            self._functions[name].add(function)
            row = {**found["columns"], "passed": report.passed}
            self._rows[name].append((found["title"], row))

    def pytest_terminal_summary(self, terminalreporter):
        if self._rows:
            sys.path.insert(0, str(_BENCHMARKS))
        for name in self._rows:
            path = self._write(name)
            terminalreporter.write_line(f"Written: {path} and .md")

    def _write(self, name):
        from _results import HARDWARE, Report

        about, functions = self._about[name], self._functions[name]
        report = Report(name=name, **{key: about[key] for key in ("question", "bar", "method")})
        for title, row in self._rows[name]:
            report.tables.setdefault(title, []).append(row)
        for title, rows in report.tables.items():
            report.summary[title] = {
                "rows": len(rows),
                "failed": sum(not row["passed"] for row in rows),
                **{
                    f"largest {column}": max(row[column] for row in rows if column in row)
                    for column in about.get("largest", ())
                    if any(column in row for row in rows)
                },
            }
        # A test whose process was ended has no row, and one that is expected to fail is no failure.
        failed = sum(len(self._failed[function]) for function in functions)
        report.summary["failed tests"] = failed
        met = not failed and all(row["passed"] for _, row in self._rows[name])
        seconds = sum(self._seconds[function] for function in functions)
        facts = report.facts(met=met, command=self._command, seconds=seconds)
        return report.write(facts, self._folder, HARDWARE)
