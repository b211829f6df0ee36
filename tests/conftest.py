"""What every test may rely on."""

import re
import signal
from pathlib import Path

import pytest
from hypothesis import settings

_ALL_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)

# Hypothesis judges what a property says, not how busy the machine is: no time limit for a single example.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

# A shell starts background jobs with Ctrl-C ignored, and they hand that on; tests of interruptions need it heard.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files of slow tests alone where slow tests are left out: importing torch and trl outlasts many tests."""
    if "not slow" not in config.option.markexpr.split(" and ") or collection_path.suffix != ".py":
        return None
    return bool(_ALL_SLOW.search(collection_path.read_text(encoding="utf-8"))) or None
