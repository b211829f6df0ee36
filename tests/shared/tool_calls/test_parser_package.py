"""The parser as a package of its own, beside other people's packages that are called `shared` and `data`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).resolve().parents[3] / "shared" / "tool_calls"
PROGRAM = """
import importlib.metadata, json, sys
import data, shared
from qwen25_coder_tool_parser import Stream, parse
tools = [{"name": "get_columns", "parameters": {"properties": {"table": {"type": "string"}}}}]
text = 'So.\\n```json\\n{"name": "get_columns", "arguments": {"table": "claims"}}\\n```'
stream = Stream(tools)
for character in text:
    stream.feed(character)
stream.finish()
points = importlib.metadata.entry_points(group="vllm.general_plugins")
print(json.dumps([
    shared.OWNER, data.OWNER, parse(text, tools).calls[0].arguments, stream.parsed() == parse(text, tools),
    sorted({name.split(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__main__"}),
    [(point.name, point.value) for point in points],
]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the folder, without network and without leaving anything beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    build = f"import setuptools.build_meta as backend; backend.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "source", check=True, capture_output=True)
    (path,) = folder.glob("qwen25_coder_tool_parser-*.whl")
    return path


def test_the_wheel_parses_beside_other_packages_called_shared_and_data(wheel: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, env=environment, check=True, capture_output=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "env")}))
    for name in ("shared", "data"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("OWNER = 'somebody else'\n")
    done = subprocess.run([python, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        "somebody else",
        "somebody else",
        {"table": "claims"},
        True,
        ["data", "qwen25_coder_tool_parser", "shared"],
        [["qwen25_coder", "qwen25_coder_tool_parser.vllm_plugin:register"]],
    ]
    commands = subprocess.run(
        [python, "-m", "qwen25_coder_tool_parser", "--help"], env=environment, capture_output=True
    )
    assert commands.returncode == 0


def test_the_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"qwen25_coder_tool_parser", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
