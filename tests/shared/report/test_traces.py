"""traces.html: every episode in one page, and what models wrote stays text."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from shared.records import Episode, Question, Reward, StopReason, ToolCall, Turn
from shared.report.traces import STEPS, Played, write_traces
from tests.browser import MARKS, chromium
from tests.processes import wait_for

MARKUP = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
SQL = f"SELECT '{MARKUP}' FROM t"


def question(number: int, text: str = "How many?") -> Question:
    return Question(f"q/{number}", f"db{number % 7}", text, SQL, "x", ("easy", "hard")[number % 2], "count")


def played(model: str, asked: Question, answer: str, right: bool = False, step: int | None = None) -> Played:
    call = ToolCall("execute_sql", {"sql": SQL})
    turns = (
        Turn("x", "", (call,), (), (f"n\n{MARKUP}\n(1 row)",), (True,), 0, 300, 20, None),
        Turn(answer, answer, (), (), (), (), 0, 380, 10, True),
    )
    reward = Reward(right, 1.0, 1.0, 1.0, float(right))
    episode = Episode(asked.id, turns, StopReason.ANSWERED, SQL, [], seconds=1.5, reward=reward)
    result = {"columns": [MARKUP], "rows": [[MARKUP], [None]], "more": False}
    way = "" if right else "wrong filter"
    return Played(model, dataclasses.replace(episode, step=step), asked, way, (result, {"error": MARKUP}))


def data_of(file: Path) -> dict[str, Any]:
    (packed,) = re.findall(r'<script id="data" type="application/octet-stream">(.*?)</script>', file.read_text())
    found = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert isinstance(found, dict)
    return found


def test_the_page_holds_each_episode_once_and_nothing_that_a_model_wrote_as_markup(tmp_path: Path) -> None:
    first, second = question(1, MARKUP), question(2)
    episodes = [
        played("sft", first, MARKUP),
        played("grpo", first, "3", right=True),
        played(STEPS, second, "4", step=3),
    ]
    write_traces(episodes, MARKUP, file := tmp_path / "traces.html")
    text = file.read_text()
    assert "onerror" not in text
    assert not re.findall(r"(?:src|href)=|url\(|https?://", text)
    assert "default-src 'none'" in text
    assert len(re.findall(r"(?:script|style)-src 'sha256-", text)) == 2
    data = data_of(file)
    assert [one["text"] for one in data["questions"]] == [MARKUP, "How many?"]
    shown = [(one["model"], one["asked"], one["step"], one["right"], one["way"]) for one in data["episodes"]]
    assert shown == [
        ("sft", 0, None, False, "wrong filter"),
        ("grpo", 0, None, True, ""),
        (STEPS, 1, 3, False, "wrong filter"),
    ]
    assert data["episodes"][0]["turns"][0]["calls"] == [["execute_sql", SQL]]


class TestInBrowser:
    pytestmark = MARKS

    def test_ten_thousand_episodes_open_in_two_seconds_and_a_link_leads_to_one(self, tmp_path: Path) -> None:
        asked = [question(number, f"Question {number} {MARKUP}") for number in range(2500)]
        episodes = [
            played(model, one, f"answer of {model}", right=model == "grpo" and place % 2 == 0)
            for model in ("base", "sft", "grpo", STEPS)
            for place, one in enumerate(asked)
        ]
        write_traces(episodes, "main", file := tmp_path / "traces.html")
        with chromium(tmp_path) as browser:
            browser.get(file.as_uri())
            assert browser.find_element("css selector", ".row")
            ready = browser.execute_script("return performance.getEntriesByName('ready')[0].startTime")
            assert ready < 2000
            assert "10,000" in browser.find_element("id", "count").text.replace("10000", "10,000")
            browser.get(f"{file.as_uri()}#grpo/q%2F7")
            browser.refresh()
            assert "Question 7 " in browser.find_element("css selector", "#detail h1").text
            assert len(browser.find_elements("css selector", "#detail .card")) >= 4
            assert browser.find_elements("css selector", ".turn.differs")
            assert browser.title != "owned"
            assert browser.find_elements("css selector", "img") == []
            assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []

    def test_keys_filters_and_the_ways_of_failing_lead_to_an_episode(self, tmp_path: Path) -> None:
        episodes = [
            played(model, question(number, f"Question {number}?"), f"answer {number}", right=model == "grpo", step=step)
            for model, step in (("sft", None), ("grpo", None), (STEPS, 3), (STEPS, 4))
            for number in range(6)
        ]
        write_traces(episodes, "main", file := tmp_path / "traces.html")
        with chromium(tmp_path) as browser:
            keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
            choices = pytest.importorskip("selenium.webdriver.support.select").Select
            browser.get(file.as_uri())
            assert browser.find_element("css selector", ".row")

            def press(*pressed: str) -> None:
                for key in pressed:
                    browser.switch_to.active_element.send_keys(key)

            def shown() -> tuple[str, str]:
                title = browser.find_element("css selector", "#detail h1").text
                return title, browser.execute_script("return decodeURIComponent(location.hash)")

            press("j")
            assert shown() == ("Question 0?", "#sft/q/0")
            press("j", "j", "k")
            assert shown() == ("Question 1?", "#sft/q/1")
            press(keys.ENTER)
            assert browser.switch_to.active_element.get_attribute("id") == "detail"
            press(keys.ESCAPE)
            assert browser.switch_to.active_element.get_attribute("id") == "list"

            def count() -> str:
                return str(browser.find_element("id", "count").text)

            choices(browser.find_element("id", "model")).select_by_visible_text("grpo")
            assert count() == "6 of 24 episodes"
            choices(browser.find_element("id", "model")).select_by_visible_text("any model")
            choices(browser.find_element("id", "step")).select_by_visible_text("step 4")
            assert count() == "6 of 24 episodes"
            press(keys.ESCAPE, "/", *"answer 5")  # Escape leaves the menu, which takes keys itself
            assert wait_for(lambda: count() == "1 of 24 episodes", 5, pause=0.1)
            press(keys.ENTER, "j")
            assert shown()[0] == "Question 5?"
            press(keys.ESCAPE)

            browser.get(f"{file.as_uri()}#?way=wrong%20filter&model=sft")
            assert wait_for(lambda: count() == "6 of 24 episodes", 5, pause=0.1)
            (way,) = browser.find_elements("css selector", "#ways button")
            assert way.text.split("\n") == ["wrong filter", "6"]
            way.click()  # takes the filter back
            assert "chosen" not in browser.find_element("css selector", "#ways button").get_attribute("class")
            assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
