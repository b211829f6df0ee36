"""The databases of a data set, each opened once, and golds run on them; what is wrong with one becomes a row's reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.sources import BadRowError
from data.sql_form import is_explain
from shared.config.schema import SandboxConfig
from shared.errors import UserError
from shared.sql.database import Database, QueryResult, SqlError


class Databases:
    """Opens a database when its first row asks for it; a broken one gives the same reason for every row.

    `find` gives the file of a name, or raises BadRowError with the reason that there is none.
    """

    def __init__(self, find: Callable[[str], Path], sandbox: SandboxConfig) -> None:
        self.opened: dict[str, Database] = {}
        self._broken: dict[str, str] = {}
        self._find = find
        self._sandbox = sandbox

    def get(self, name: str) -> Database:
        """The database of that name; raises BadRowError when it is missing or damaged."""
        if name in self._broken:
            raise BadRowError(self._broken[name])
        if name not in self.opened:
            try:
                self.opened[name] = Database(self._find(name), self._sandbox)
            except (BadRowError, UserError) as reason:
                self._broken[name] = str(reason).rstrip(".")
                raise BadRowError(self._broken[name]) from None
        return self.opened[name]

    def run_gold(self, name: str, sql: str) -> QueryResult:
        """The whole result of a gold; raises BadRowError when it fails, answers nothing or is too large to be compared."""
        if is_explain(sql):
            raise BadRowError("its gold SQL is an EXPLAIN, which gives a plan and no answer; give the query itself")
        try:
            result = self.get(name).execute(sql, self._sandbox.max_compare_rows)
        except SqlError as error:
            raise BadRowError(f"its gold SQL fails ({str(error).rstrip('.')}); correct the query") from None
        except UserError as error:
            raise BadRowError(str(error).rstrip(".")) from None
        if result.truncated:
            raise BadRowError(
                "its gold SQL returns too much to be compared; narrow the query or raise sandbox.max_compare_rows and "
                "sandbox.max_result_bytes"
            )
        return result
