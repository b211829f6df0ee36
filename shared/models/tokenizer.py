"""Counting and cutting text in the model's own tokens, without transformers or torch.

The `tokenizers` package reads the same `tokenizer.json` the model was trained with, so a limit given in tokens means
what the server will count. Special tokens are not added here: chat templates write them as text.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers

from shared.errors import UserError


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder; raises UserError when it has no readable `tokenizer.json`."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"Model folder {folder} has no tokenizer.json; save the fast tokenizer of the model there.")
        try:
            return cls(tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8")))
        except Exception as error:  # the package raises plain Exception for a damaged file
            raise UserError(f"{file} cannot be read ({error}); save the tokenizer of the model again.") from error

    def count(self, text: str) -> int:
        """Number of tokens of `text`."""
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special token added."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """Text of `ids`; `skip_special` leaves out end-of-turn marks and the like."""
        return str(self._inner.decode(ids, skip_special_tokens=skip_special))

    def cut(self, text: str, max_tokens: int) -> tuple[str, bool]:
        """The longest beginning of `text` of at most `max_tokens` tokens, and whether anything was cut."""
        encoding = self._inner.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= max_tokens:
            return text, False
        end = encoding.offsets[max_tokens][0] if max_tokens > 0 else 0
        # A beginning can have more tokens than it had inside the whole text, where longer tokens spanned its end.
        while end and self.count(text[:end]) > max_tokens:
            end -= 1
        return text[:end], True
