"""Measurements, each a command of its own: `python -m tests.bench.<name>`."""

import shared  # noqa: F401  it says which Python to use where this one lacks packages
