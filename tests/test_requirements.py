"""The package lists that texts and messages send people to."""

import re
from collections.abc import Iterator
from pathlib import Path

from shared.config.device import PROFILES, device_of

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("tests/bench", "data", "shared", "stage1_sft", "stage2_grpo")


def named() -> Iterator[str]:
    """Every list that the product speaks of; a message that leaves the profile open means each one's."""
    code = (file for folder in FOLDERS for file in (REPO / folder).rglob("*.py"))
    for file in (*REPO.glob("*.md"), *REPO.glob("*.py"), *REPO.glob("*.toml"), *REPO.glob("*.yaml"), *code):
        for name in re.findall(r"requirements/(?:[\w-]|\{profile\})+\.(?:txt|in)", file.read_text("utf-8")):
            yield from (name.replace("{profile}", device_of(profile)) for profile in PROFILES)


def test_every_package_list_that_is_named_exists() -> None:
    names = set(named())
    assert {"requirements/optional.txt", "requirements/live.txt", "requirements/gpu.txt"} <= names
    assert [name for name in names if not (REPO / name).is_file()] == []
