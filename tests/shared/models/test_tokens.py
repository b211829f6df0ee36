"""Counting and cutting in tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import UserError
from shared.models.tokenizer import Tokenizer
from tests.shared.examples import tiny_tokenizer, tokenizer_folder

TOKENIZER = tiny_tokenizer()


def test_a_model_folder_gives_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder(tmp_path))
    ids = tokenizer.encode("SELECT amount FROM claims")
    assert tokenizer.count("SELECT amount FROM claims") == len(ids) < 25
    assert tokenizer.decode(ids) == "SELECT amount FROM claims"


def test_special_tokens_are_one_token_and_can_be_left_out() -> None:
    ids = TOKENIZER.encode("done<|im_end|>")
    assert TOKENIZER.decode(ids) == "done"
    assert TOKENIZER.decode(ids, skip_special=False) == "done<|im_end|>"
    assert len(ids) == len(TOKENIZER.encode("done")) + 1


@pytest.mark.parametrize("content", [None, "", "{", '{"model": {"type": "Unheard"}}'])
def test_a_folder_without_a_readable_tokenizer_is_the_users_problem(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_text_that_fits_is_not_cut() -> None:
    text = "SELECT 1"
    assert TOKENIZER.cut(text, TOKENIZER.count(text)) == (text, False)


@settings(max_examples=200)
@given(st.text(max_size=60), st.integers(min_value=0, max_value=20))
def test_a_cut_text_is_a_beginning_within_the_limit(text: str, limit: int) -> None:
    kept, cut = TOKENIZER.cut(text, limit)
    assert text.startswith(kept)
    assert TOKENIZER.count(kept) <= limit
    assert cut == (kept != text)


def test_a_cut_keeps_as_much_as_fits() -> None:
    text = "SELECT amount FROM claims WHERE amount > 100"
    kept, _ = TOKENIZER.cut(text, 8)
    assert TOKENIZER.count(kept) == 8
