"""`python -m stage1_sft`: stage 1 of a run, and what serves it: `yield`, `convert` and `merge`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from shared.cli.command_line import Parser, carry_out, common_parser, resolve, run_main
from shared.errors import UserError
from shared.models.folder import adapter_base
from shared.runs.output_paths import refuse_overwriting

_DESCRIPTION = """Stage 1: synthesise executed tool-call traces from the run's questions, fine-tune the model on them
with LoRA, merge and verify the result. Prints SFT_MODEL_PATH=<folder>. The same command continues where it stopped."""
_COMMANDS = {
    "yield": "show which golds become a trace: yield FOLDER",
    "convert": "write traces for TRL, Axolotl or LLaMA-Factory: convert TRACES --to NAME --out FILE",
    "merge": "merge a LoRA adapter into its base model: merge ADAPTER --out FOLDER",
}


def main() -> None:
    """Choose between the stage and its other commands."""
    commands = {"merge": _merge, "convert": _convert, "yield": _yield}
    if sys.argv[1:2] and sys.argv[1] in commands:
        return commands[sys.argv[1]](sys.argv[2:])
    if sys.argv[1:2] == ["export"]:
        raise UserError("`python -m stage1_sft export` is now `python -m stage1_sft convert`, with the same options.")
    parser = common_parser("python -m stage1_sft", _DESCRIPTION, _COMMANDS)
    parser.add_argument("--traces-only", action="store_true", help="stop after writing the traces")
    args = parser.parse_args()

    from stage1_sft import stage

    return carry_out(args, stage.plan, stage.only_traces if args.traces_only else stage.run)


def _merge(arguments: list[str]) -> None:
    parser = Parser("python -m stage1_sft merge", "Merge a LoRA adapter and verify it.")
    parser.add_argument("adapter", type=Path, help="folder with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the whole model to; must not exist")
    parser.add_argument("--base", help="folder, hub id or smollm2-135m (default: the one that the adapter names)")
    parser.add_argument("--cache", type=Path, help="where to keep an unpacked or adapted base (default: not kept)")
    args = parser.parse_args(arguments)
    if args.out.exists():
        raise UserError(f"--out {args.out} already exists; name a new folder.")
    refuse_overwriting([args.out], [args.adapter])
    base = adapter_base(args.adapter)
    base = args.base or base
    if not base:
        raise UserError(f"{args.adapter} does not name its base model; give it with --base.")

    from stage1_sft.base_model import resolve as resolve_model

    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="base-model-", dir=args.out.parent) as passing:
        folder = resolve_model(base, args.cache or Path(passing))

        from stage1_sft.merge import merge  # torch

        figures = merge(folder, args.adapter, args.out)
    print(f"merged and verified: {figures}\nSFT_MODEL_PATH={args.out.resolve()}")


def _convert(arguments: list[str]) -> None:
    from shared.records import JsonlTail, write_jsonl
    from stage1_sft.convert import FORMATS, convert

    description = "Write traces as other trainers read them; see stage1_sft/convert.py."
    parser = Parser("python -m stage1_sft convert", description)
    parser.add_argument("traces", type=Path, help="traces.jsonl of a run")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the trainer")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write; must not exist")
    args = parser.parse_args(arguments)
    if not args.traces.is_file():
        raise UserError(f"There is no file {args.traces}; name the traces.jsonl of a run.")
    traces: list[Any] = JsonlTail(args.traces).new_rows()
    if not traces or not all({"messages", "tools", "trained"} <= trace.keys() for trace in traces):
        raise UserError(
            f"{args.traces} holds no traces, or other rows, too; make some with `python -m stage1_sft --traces-only`."
        )
    if args.out.exists():
        raise UserError(f"--out {args.out} already exists; name a new file.")
    refuse_overwriting([args.out], [args.traces])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    written = write_jsonl(args.out, convert(traces, args.to))
    left_out = f"; {len(traces) - written} hold a turn that {args.to} cannot leave untrained"
    print(f"{written} traces written to {args.out}{left_out if written < len(traces) else ''}")


def _yield(arguments: list[str]) -> None:
    from shared.models.tokenizer import Tokenizer
    from shared.records import read_questions
    from shared.runs.manifest import model_cache
    from stage1_sft.base_model import resolve as resolve_model
    from stage1_sft.synthesize import describe_yield

    description = "Show which golds become a verified trace, why the others do not, and how much the traces differ."
    parser = common_parser("python -m stage1_sft yield", description)
    parser.add_argument(
        "questions", type=Path, help="folder that `python -m data import --out` wrote, or a JSONL of it"
    )
    args = parser.parse_args(arguments)
    config, _ = resolve(args)
    file = args.questions / "questions.jsonl" if args.questions.is_dir() else args.questions
    try:
        questions = [*read_questions(file)]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read as questions ({error}); `python -m data import {args.questions} --out FOLDER` "
            "makes a folder to give here."
        ) from error
    if args.dry_run:
        print(f"would make a trace of each of the {len(questions)} questions in {file}")
        return
    tokenizer = Tokenizer.from_folder(resolve_model(config.model, model_cache(config)))
    print("\n".join(describe_yield(questions, config, tokenizer)))


if __name__ == "__main__":
    run_main(main)
