"""No command writes over or removes what it reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shared.errors import UserError


def refuse_overwriting(outputs: Iterable[Path], reads: Iterable[Path]) -> None:
    """Raise UserError when writing one of `outputs` would replace or remove one of `reads`.

    An output is a file, or a folder that is replaced with all it holds; what is written beside it on the way
    (`.partial`) and what is kept of it (`.old`) count too. Links are followed and inodes compared: one file may have
    several names.
    """
    sources = list(reads)
    for output in outputs:
        for place in (output, output.with_name(f"{output.name}.partial"), output.with_name(f"{output.name}.old")):
            targets = {place.absolute(), place.resolve()}
            for source in sources:
                within = {source.absolute(), source.resolve(), *source.absolute().parents, *source.resolve().parents}
                same_file = place.exists() and source.exists() and place.samefile(source)
                if same_file or targets & within:
                    raise UserError(
                        f"{output} cannot be written: it would replace {source}, which this command reads; "
                        "choose another place for what it writes."
                    )
