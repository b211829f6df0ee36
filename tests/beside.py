"""Data sets and parser cases that may lie beside the repository; tests that need them skip where they are not."""

from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parents[2] / "shared"
REAL_DATA = _FOLDER / "realdata"
PARSER_CASES = _FOLDER / "parser_cases" / "format_cases.jsonl"

needs_real_data = pytest.mark.skipif(not REAL_DATA.exists(), reason="the real data sets are not beside the repository")
needs_parser_cases = pytest.mark.skipif(
    not PARSER_CASES.exists(), reason="the parser cases are not beside the repository"
)
