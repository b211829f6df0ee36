"""`python -m stage1_sft`: stage 1 of a run, or `merge` of any LoRA adapter into a whole model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shared.cli import carry_out, common_parser, run_main
from shared.errors import UserError
from shared.runs import MODEL_CACHE

_DESCRIPTION = """Stage 1: synthesise executed tool-call traces from the run's questions, fine-tune the model on them with
LoRA, merge and verify the result. Prints SFT_MODEL_PATH=<folder>. The same command continues where it was interrupted.
`python -m stage1_sft merge ADAPTER --out FOLDER` merges an adapter into its base model."""


def main() -> None:
    """Choose between the stage and `merge`."""
    if sys.argv[1:2] == ["merge"]:
        _merge(sys.argv[2:])
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
    args = parser.parse_args(arguments)
    if args.out.exists():
        raise UserError(f"--out {args.out} already exists; name a new folder.")

    from stage1_sft.base_model import resolve as resolve_model
    from stage1_sft.export import adapter_base, merge

    base = args.base or adapter_base(args.adapter)
    if not base:
        raise UserError(f"{args.adapter} does not name its base model; give it with --base.")
    figures = merge(resolve_model(base, args.out.parent / MODEL_CACHE), args.adapter, args.out)
    print(f"merged and verified: {figures}\nSFT_MODEL_PATH={args.out.resolve()}")


if __name__ == "__main__":
    run_main(main)
