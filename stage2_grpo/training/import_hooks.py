"""Run a function right after a module's first import, in this process.

VERL, vLLM and Agent Lightning are changed in a few named spots. Importing those heavy modules early just to change them
would cost seconds in every worker, so the change waits for the import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Patch = Callable[[Any], None]


class PinnedCodeChanged(RuntimeError):
    """A name that a patch replaces is gone: the installed version is not the one the patch was written for."""


class _PatchFinder(importlib.abc.MetaPathFinder):
    """Lets the usual finder locate a module and wraps its loading."""

    def __init__(self) -> None:
        self.patches: defaultdict[str, list[Patch]] = defaultdict(list)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            for patch in self.patches[fullname]:
                patch(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


_FINDER = _PatchFinder()


def install(patches: Mapping[str, Patch]) -> None:
    """Apply each patch to its module: now if it is imported already, else right after its import."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            _FINDER.patches[name].append(patch)


def replace(owner: Any, name: str, value: Any) -> Any:
    """Set `owner.name = value` and return the old value; raises PinnedCodeChanged when there is no such name."""
    if not hasattr(owner, name):
        raise PinnedCodeChanged(
            f"{getattr(owner, '__name__', owner)} has no {name}, which stage 2 replaces: the installed version differs "
            "from the pinned one; install the requirements again, or review the patch."
        )
    old = getattr(owner, name)
    setattr(owner, name, value)
    return old
