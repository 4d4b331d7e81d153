"""A pytest plugin that writes each failed test with its first failure to `--first-failures`, for `tests/suite.py`.

It promises a JSON object of test ids and failures, `{}` where none failed; a file that cannot be collected is no
test. It writes nothing where a run ends before its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first-failures", type=Path, help="where to write the failed tests and their first failures")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--first-failures")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FirstFailures(file))


class _FirstFailures:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._failures: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, report.longreprtext)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        yield
        self._file.write_text(json.dumps(self._failures))
