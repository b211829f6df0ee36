"""No command writes over or removes what it reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.runs.output_paths import refuse_overwriting


@pytest.fixture
def read(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "questions.jsonl"
    file.write_text("irreplaceable")
    (tmp_path / "link.jsonl").symlink_to(file)
    (tmp_path / "linked").symlink_to(tmp_path / "mine")
    os.link(file, tmp_path / "hard.jsonl")
    return file


@pytest.mark.parametrize(
    "output",
    ["mine/questions.jsonl", "mine", ".", "mine/../mine/questions.jsonl", "link.jsonl", "linked",
     "linked/questions.jsonl", "hard.jsonl"],
)  # fmt: skip
def test_an_output_that_is_an_input_by_any_name_is_refused(output: str, read: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"cannot be written: it would replace .*questions\.jsonl, which this command reads"
    ):
        refuse_overwriting([tmp_path / output], [read])
    assert read.read_text() == "irreplaceable"


def test_a_link_that_is_read_is_not_replaced_either(read: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="would replace"):
        refuse_overwriting([tmp_path / "link.jsonl"], [tmp_path / "link.jsonl"])
    with pytest.raises(UserError, match="would replace"):
        refuse_overwriting([tmp_path / "mine"], [tmp_path / "linked" / "questions.jsonl"])


@pytest.mark.parametrize("ending", [".partial", ".old"])
def test_what_is_written_or_kept_beside_an_output_counts_too(ending: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="would replace"):
        refuse_overwriting([tmp_path / "out"], [tmp_path / f"out{ending}"])


def test_an_output_beside_or_below_what_is_read_is_fine(read: Path, tmp_path: Path) -> None:
    refuse_overwriting([tmp_path / "new", read.parent / "other.jsonl", read.parent / "imported"], [read, tmp_path])
