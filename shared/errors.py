"""The one exception a user is meant to read.

A `UserError` is raised where a setting, a file or a service is wrong and the user can do something about it. Its text
is one sentence or two: what is wrong (naming the thing), why it matters, how to fix it. Every command line prints it
without a traceback and exits with status 2. Anything else that escapes is a bug and keeps its traceback.
"""


class UserError(Exception):
    """A problem the user can fix; `str(error)` is the whole message."""
