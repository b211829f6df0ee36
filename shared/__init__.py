"""What both stages use; works without torch."""

import sys

from shared.errors import UserError, explain

_MOVED = {
    "shared.evaluate": "shared.evaluation",
    "shared.analyse": "shared.report --rules",
    "shared.evaluation.analyse": "shared.report --rules",
}

if sys.argv[:1] == ["-m"]:  # `python -m shared.NAME` imports that module next; this Python may lack its packages
    sys.excepthook = explain
    _asked = next((word for word in sys.orig_argv if word in _MOVED), None)
    if _asked:
        raise UserError(f"`python -m {_asked}` is now `python -m {_MOVED[_asked]}`.")
