"""`python -m stage2_grpo budget`: measures the episodes of a run, prints what they need, what fits, and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared.cli.command_line import common_parser, resolve
from shared.config.load import load_config
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.folder import check_model_folder
from shared.models.shape import ModelShape, read_shape
from shared.records import read_questions
from shared.runs.manifest import RunDirectory, question_file, read_manifest, read_started
from stage2_grpo.inputs import planned_model
from stage2_grpo.preflight import memory
from stage2_grpo.preflight.lengths import Counter, current, derive, measure, overflow, quantile
from stage2_grpo.preflight.memory import GIB

_DESCRIPTION = """Measures, with the model's tokenizer, the traces of stage 1 and the recorded episodes of a run, and
derives the limits of prompts, episodes and rows, the KV cache, and what fits GPUs of 16 to 80 GiB. Ends with the
--set lines to use; changes no setting."""


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = common_parser("python -m stage2_grpo budget", _DESCRIPTION)
    parser.add_argument(
        "--model", type=Path, help="folder of tokenizer, template and sizes (default: what the settings name)"
    )
    parser.add_argument("--share", type=float, default=0.99, help="of the episodes that must run to their end (0.99)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args(arguments)
    if not 0 < args.share <= 1:
        raise UserError(f"--share is {args.share}; it must be above 0 and at most 1.")
    config, run = resolve(args)
    files = sources(run)
    named = ", ".join(map(str, files))
    if args.dry_run:
        print(f"would measure {named or f'the traces of {run.sft}, which are not there yet'}")
        return
    half_made = read_started(run.sft) and not read_manifest(run.sft) and not (run.sft / "val_traces.jsonl").exists()
    if not files or half_made:
        raise UserError(
            f"{run.sft} holds {'only half of the' if files else 'no'} traces to measure; run `python -m stage1_sft "
            f"--traces-only --profile {config.profile} --run-name {run.path.name}` first (no training)."
        )
    questions = [one for split in ("train", "val", "test") for one in read_questions(question_file(run, split))]
    model = args.model or planned_model(config, run)[0]
    check_model_folder(model, "the measured model")
    counter = Counter(model, config.agent)
    openings = [counter.opening(question.question) for question in questions]
    episodes = list(measure(files, questions, counter, config.sandbox))
    if not episodes:
        raise UserError(f"{named} hold no episode; run `python -m stage1_sft --traces-only`.")
    limits = derive(episodes, openings, args.share)
    planned = load_config(args.config, config.profile, [*args.overrides, *(f"{k}={v}" for k, v in limits.items())])
    shape = read_shape(model)
    uncut = [length for episode in episodes for length in episode.uncut]
    values: dict[str, Any] = {
        "model": str(model),
        "episodes": len(episodes),
        "questions": len(questions),
        "measured": {
            name: dict(
                zip(("median", "p95", "p99", "max"), (quantile(v, s) for s in (0.5, 0.95, 0.99, 1)), strict=True)
            )
            for name, v in {
                "first prompt": openings,
                "answer of a turn": [answer for episode in episodes for answer in episode.answers],
                "tool answer, without a limit": uncut,
                "prompt growth from turn to turn": [growth for episode in episodes for growth in episode.growths],
                "episode (last prompt and answer)": [
                    episode.total(config.agent.observation_tokens) for episode in episodes
                ],
                "turns of an episode": [len(episode.answers) for episode in episodes],
            }.items()
        },
        "overflow_now": overflow(episodes, openings, current(config)),
        "overflow_suggested": overflow(episodes, openings, limits),
        "cards": [asdict(memory.fit(shape, planned, card)) for card in memory.CARDS],
        "now": current(config),
        "set": limits,
    }
    print(json.dumps(values, indent=2) if args.json else "\n".join(_lines(values, shape, planned)))


def sources(run: RunDirectory) -> list[Path]:
    """The traces, also those that the limits leave out, and the recorded episodes that a run has."""
    files = [run.sft / f"{name}{kind}.jsonl" for name in ("traces", "val_traces") for kind in ("", ".too_long")]
    files += [run.evaluation(who) / "episodes.jsonl" for who in ("sft", "grpo")]  # the base model's end without a call
    return [file for file in files if file.exists() and file.stat().st_size]


def _lines(values: dict[str, Any], shape: ModelShape, config: Config) -> Iterator[str]:
    asked = f"the first prompts of {values['questions']} questions with {values['model']}"
    yield f"measured {values['episodes']} episodes and {asked}"
    yield f"{'tokens':<44}{'median':>8}{'95 %':>8}{'99 %':>8}{'most':>8}"
    for name, row in values["measured"].items():
        yield f"{name:<44}" + "".join(f"{value:>8}" for value in row.values())
    yield f"\n{'does not fit':<44}{'settings now':>14}{'suggested':>14}"
    for name, share in values["overflow_now"].items():
        yield f"{name:<44}{share:>14.1%}{values['overflow_suggested'][name]:>14.1%}"
    block, run = memory.BLOCK_TOKENS[config.profile], memory.run_bytes(shape, config) / GIB
    blocks = config.vllm.max_num_seqs * -(-config.agent.context_tokens // block)
    yield (
        f"\nKV cache for {config.vllm.max_num_seqs} episodes at once (vllm.max_num_seqs): {blocks} blocks of {block} "
        f"tokens, {blocks * block * shape.kv_bytes / GIB:.2f} GiB ({shape.kv_bytes} bytes a token)"
    )
    yield f"a checkpoint takes {memory.checkpoint_bytes(shape, config) / GIB:.2f} GiB, the run {run:.2f} GiB of disk"
    yield f"main memory: about {memory.main_memory(shape, config) / GIB:.0f} GiB"
    yield f"with the suggested settings, {shape.parameters / 1e6:.0f} M weights (computed, not measured):"
    yield "GPU      cache GiB  KV blocks  episodes  pass GiB  tokens a pass  rows  fits"
    for card in values["cards"]:
        yield (
            f"{f'{card["gib"]} GB':<8}{card['cache_gib']:>10.1f}{card['cache_blocks']:>11}{card['episodes']:>10}"
            f"{card['pass_gib']:>10.1f}{card['pass_tokens']:>15}{card['rows']:>6}  {'yes' if card['fits'] else 'no'}"
        )
    yield "\nsuggested settings (now):"
    for name, value in values["set"].items():
        now = values["now"][name]
        yield f"  --set {name}={value}".ljust(52) + (f"({now})" if now != value else "(as it is)")
