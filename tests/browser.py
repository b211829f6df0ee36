"""Headless Chromium for tests of pages; such tests are slow, and skip where selenium or Chromium is absent."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MARKS = [pytest.mark.slow, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium is not installed")]


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """A browser with its profile and downloads in `folder`; it waits up to 15 s for an element."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={folder}/profile")
    options.add_experimental_option("prefs", {"download.default_directory": str(folder / "downloads")})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.implicitly_wait(15)
    try:
        yield driver
    finally:
        driver.quit()
