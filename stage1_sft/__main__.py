"""`python -m stage1_sft`: stage 1 of a run, `merge` of any LoRA adapter into a whole model, or `export` of traces."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from shared.cli.command_line import carry_out, common_parser, run_main
from shared.errors import UserError
from shared.models.folder import adapter_base

_DESCRIPTION = """Stage 1: synthesise executed tool-call traces from the run's questions, fine-tune the model on them with
LoRA, merge and verify the result. Prints SFT_MODEL_PATH=<folder>. The same command continues where it was interrupted.
`python -m stage1_sft merge ADAPTER --out FOLDER` merges an adapter into its base model, `python -m stage1_sft export TRACES
--to NAME --out FILE` writes traces as TRL, Axolotl or LLaMA-Factory read them."""


def main() -> None:
    """Choose between the stage, `merge` and `export`."""
    commands = {"merge": _merge, "export": _export}
    if sys.argv[1:2] and sys.argv[1] in commands:
        commands[sys.argv[1]](sys.argv[2:])
        return
    parser = common_parser("python -m stage1_sft", _DESCRIPTION)
    parser.add_argument("--traces-only", action="store_true", help="stop after writing the traces")
    args = parser.parse_args()

    from stage1_sft import stage

    carry_out(args, stage.plan, stage.only_traces if args.traces_only else stage.run)


def _merge(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m stage1_sft merge", description="Merge a LoRA adapter and verify it."
    )
    parser.add_argument("adapter", type=Path, help="folder with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the whole model to; must not exist")
    parser.add_argument(
        "--base", help="base model: folder, hub id or smollm2-135m (default: the one the adapter names)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        help="folder to keep an unpacked or adapted base model in, as runs/models (default: not kept)",
    )
    args = parser.parse_args(arguments)
    if args.out.exists():
        raise UserError(f"--out {args.out} already exists; name a new folder.")

    named = adapter_base(args.adapter)
    base = args.base or named
    if not base:
        raise UserError(f"{args.adapter} does not name its base model; give it with --base.")

    from stage1_sft.base_model import resolve as resolve_model

    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="base-model-", dir=args.out.parent) as passing:
        folder = resolve_model(base, args.cache or Path(passing))

        from stage1_sft.export import merge  # torch

        figures = merge(folder, args.adapter, args.out)
    print(f"merged and verified: {figures}\nSFT_MODEL_PATH={args.out.resolve()}")


def _export(arguments: list[str]) -> None:
    from shared.records import JsonlTail, write_jsonl
    from stage1_sft.formats import FORMATS, export

    parser = argparse.ArgumentParser(
        prog="python -m stage1_sft export",
        description="Write traces as other trainers read them; see stage1_sft/formats.py.",
    )
    parser.add_argument("traces", type=Path, help="traces.jsonl of a run")
    parser.add_argument("--to", choices=FORMATS, required=True, help="the trainer")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write; must not exist")
    args = parser.parse_args(arguments)
    if not args.traces.is_file():
        raise UserError(f"There is no file {args.traces}; name the traces.jsonl of a run.")
    traces = JsonlTail(args.traces).new_rows()
    if not traces or not all({"messages", "tools", "trained"} <= trace.keys() for trace in traces):
        raise UserError(
            f"{args.traces} holds no traces, or other rows, too; make some with `python -m stage1_sft --traces-only`."
        )
    if args.out.exists():
        raise UserError(f"--out {args.out} already exists; name a new file.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    written = write_jsonl(args.out, export(traces, args.to))
    others = (
        f"; {len(traces) - written} hold a turn that {args.to} cannot leave untrained" if written < len(traces) else ""
    )
    print(f"{written} traces written to {args.out}{others}")


if __name__ == "__main__":
    run_main(main)
