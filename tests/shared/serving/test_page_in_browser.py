"""The page in a real browser: ask, steps, rows, chart, CSV, and hostile text that stays text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from shared.records import ToolCall
from tests.browser import MARKS, chromium
from tests.scripted_server import answer
from tests.shared.serving.running import KEY, serving

pytestmark = MARKS

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TABLE = f'CREATE TABLE "{MARKUP.replace(chr(34), chr(34) * 2)}" (x TEXT);'


def model(request: dict[str, Any]) -> dict[str, Any]:
    """Look for the hostile table, select a hostile label and a number, answer with markup."""
    said = [message["role"] for message in request["messages"]].count("tool")
    if said == 0:
        return answer(MARKUP, calls=[ToolCall("search_schema", {"query": "img script"})])
    if said == 1:
        literal = MARKUP.replace("'", "''")
        return answer(
            calls=[ToolCall("execute_sql", {"sql": f"SELECT '{literal}' AS label, 7 AS n UNION ALL SELECT '=1+1', -3"})]
        )
    return answer(f"Seven {MARKUP}")


def test_ask_watch_chart_and_download(tmp_path: Path) -> None:
    with chromium(tmp_path) as browser, serving(model, tmp_path, extra=TABLE) as url:
        browser.get(f"{url}/#key={KEY}")
        browser.find_element("id", "question").send_keys(MARKUP + "\n")
        assert browser.find_element("class name", "answer").text == f"Seven {MARKUP}"
        assert browser.find_element("tag name", "h2").text == MARKUP
        assert "search_schema(" in browser.find_element("css selector", "pre.call").text
        assert MARKUP in browser.find_element("css selector", "pre.tool").text.replace('""', '"')
        cells = [cell.text for cell in browser.find_elements("css selector", "td")]
        assert sorted(cells) == sorted([MARKUP, "7", "=1+1", "-3"])
        assert len(browser.find_elements("css selector", "svg rect")) == 2
        browser.find_element("css selector", "p.note button").click()
        file, deadline = tmp_path / "downloads" / "result.csv", time.monotonic() + 15
        while not file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert file.read_text().splitlines()[0] == "label,n"
        assert "'=1+1,-3" in file.read_text().splitlines()
        assert browser.title == "firstcall"
        assert browser.find_elements("tag name", "img") == []
        assert KEY not in browser.current_url
        assert [line for line in browser.get_log("browser") if "favicon" not in line["message"]] == []
