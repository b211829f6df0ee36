"""The adapter against the contracts of vLLM 0.10 to 0.33, recorded as small packages with the same names and fields.

What the installed vLLM really does is tested in `test_vllm_parser`; this shows that the imports find their way
elsewhere, and that the end of a stream is heard where vLLM announces it: to parsers that then say
`engine_based_streaming`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
OLD_PARSERS, PARSERS = "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser", "vllm.tool_parsers"
LAYOUTS = {
    "0.10": (OLD_PARSERS, "vllm.entrypoints.openai.protocol", "self, tokenizer"),
    "0.13": (PARSERS, "vllm.entrypoints.openai.protocol", "self, tokenizer"),
    "0.15": (PARSERS, "vllm.entrypoints.openai.engine.protocol", "self, tokenizer"),
    "0.20": (PARSERS, "vllm.entrypoints.openai.engine.protocol", "self, tokenizer, tools=None"),
    "0.33": (PARSERS, "vllm.entrypoints.generate.base.protocol", "self, tokenizer, tools=None"),
}

PARSER_MODULE = """
class ToolParser:
    def __init__({arguments}):
        self.model_tokenizer, self.prev_tool_call_arr, self.streamed_args_for_tool = tokenizer, [], []
        self.vocab = tokenizer.get_vocab()
    def adjust_request(self, request):
        return request

class ToolParserManager:
    tool_parsers = {{}}
    @classmethod
    def register_module(cls, name=None, force=True, module=None):
        cls.tool_parsers[name] = module
"""
PROTOCOL_MODULE = """
from types import SimpleNamespace
class _Record(SimpleNamespace):
    id = "call_1"
DeltaFunctionCall = DeltaMessage = DeltaToolCall = ExtractedToolCallInformation = FunctionCall = ToolCall = _Record
"""
PROGRAM = """
import importlib, json, sys
from types import SimpleNamespace as Record
from shared.agent.prompts import TOOLS
from shared.tool_calls import vllm_plugin as plugin
cls = importlib.import_module(sys.argv[1]).ToolParserManager.tool_parsers["qwen25_coder"]
text = 'So.\\n<tool_call>\\n{"name": "get_columns", "arguments": {"table": "claims"}}\\n</tool_call>'
request = Record(tools=TOOLS, tool_choice="auto")
make = lambda: cls(Record(get_vocab=lambda: {"<|im_end|>": 7}, eos_token_id=7))
whole = make().extract_tool_calls(text, request)
parser, messages = make(), []
for end in range(len(text)):
    last = end == len(text) - 1
    tokens = [[], [1], [7 if last else 1]]
    messages.append(parser.extract_tool_calls_streaming(text[:end], text[:end + 1], text[end], *tokens, request))
deltas = [delta for message in messages if message for delta in message.tool_calls]
parser, bare = make(), text[text.index("{"):text.rindex("}") + 1]
undecided = parser.extract_tool_calls_streaming("", bare, bare, [], [1], [1], request)
rest = parser.finish_streaming() if getattr(parser, "engine_based_streaming", False) else None
print(json.dumps([whole.content, whole.tool_calls[0].function.arguments,
                  "".join(m.content or "" for m in messages if m), deltas[0].function.name,
                  deltas[1].function.arguments, undecided, rest.tool_calls[1].function.arguments]))
"""


@pytest.mark.parametrize("version", LAYOUTS)
def test_the_adapter_finds_its_way_in_each_layout(version: str, tmp_path: Path) -> None:
    parsers, protocol, arguments = LAYOUTS[version]
    _write_module(tmp_path, parsers, PARSER_MODULE.format(arguments=arguments))
    _write_module(tmp_path, protocol, PROTOCOL_MODULE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", PROGRAM, parsers]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    arguments_json = '{"table": "claims"}'
    assert json.loads(done.stdout) == [
        "So.",
        arguments_json,
        "So.",
        "get_columns",
        arguments_json,
        None,
        arguments_json,
    ]


def test_a_vllm_of_another_layout_is_refused_in_a_sentence(tmp_path: Path) -> None:
    _write_module(tmp_path, PARSERS, PARSER_MODULE.format(arguments="self, tokenizer"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "import shared.tool_calls.vllm_plugin"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "This vLLM has no DeltaFunctionCall" in done.stderr


def _write_module(root: Path, name: str, code: str) -> None:
    folder = root
    for part in name.split("."):
        folder = folder / part
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / "__init__.py").write_text(code, encoding="utf-8")
