"""`python -m stage2_grpo budget`: measure the episodes of a run, print what they need, what fits, and the settings to use."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.cli.command_line import common_parser, resolve
from shared.config.schema import Config
from shared.errors import UserError
from shared.models.folder import check_model_folder, local_path
from shared.models.shape import ModelShape, read_shape
from shared.records import JsonlTail, Question, read_questions
from shared.runs.manifest import RunDirectory, model_cache, question_file, read_manifest, read_started
from stage2_grpo.inputs import starting_model
from stage2_grpo.preflight.budget import memory
from stage2_grpo.preflight.budget.lengths import Counter, EpisodeLengths, Replay, calls_of, from_record, from_trace
from stage2_grpo.preflight.budget.limits import Limits, current, derive, overflow, quantile
from stage2_grpo.preflight.budget.memory import GIB

_DESCRIPTION = """Measures, with the model's tokenizer, the traces of stage 1 and the recorded episodes of a run, and derives the
limits of prompts, episodes and rows, the KV cache, and what fits GPUs of 16 to 80 GiB. Without traces stage 1 makes them
first (no training). Ends with the --set lines to use; changes no setting."""
_SPLITS = ("train", "val", "test")
_REFUSED = 2  # stage 1 says so when no trace is within the limits, and has written those that are not


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    args = _parser().parse_args(arguments)
    if not 0 < args.share <= 1:
        raise UserError(f"--share is {args.share}; it must be above 0 and at most 1.")
    config, run = resolve(args)
    if args.dry_run:
        print(f"would measure {', '.join(map(str, sources(run))) or f'traces that stage 1 makes in {run.sft}'}")
        return
    if not sources(run) or _half_made(run):
        _make_traces(args)
    questions = [question for split in _SPLITS for question in read_questions(question_file(run, split))]
    model = args.model or _model(config, run)
    check_model_folder(model, "the measured model")
    counter = Counter(model)
    episodes = list(measure(sources(run), questions, counter, config))
    if not episodes:
        raise UserError(
            f"{', '.join(map(str, sources(run)))} hold no episode; run `python -m stage1_sft --traces-only`."
        )
    openings = {question.id: counter.opening(question.question) for question in questions}
    limits, shape = derive(episodes, openings, config, args.share), read_shape(model)
    if args.json:
        print(json.dumps(_values(episodes, openings, limits, config, shape), indent=2))
    else:
        print("\n".join(_report(episodes, openings, limits, config, shape)))


def sources(run: RunDirectory) -> list[Path]:
    """The traces, also those that the limits leave out, and the recorded episodes that a run has."""
    files = [run.sft / f"{name}{kind}.jsonl" for name in ("traces", "val_traces") for kind in ("", ".too_long")]
    # Not the base model's: its episodes end without a call.
    files += [run.evaluation(who) / "episodes.jsonl" for who in ("sft", "grpo")]
    return [file for file in files if file.exists() and file.stat().st_size]


def measure(
    files: Iterable[Path], questions: Sequence[Question], counter: Counter, config: Config
) -> Iterator[EpisodeLengths]:
    """The lengths of all episodes in traces and recordings, with their observations replayed without limit."""
    replay = Replay(questions, counter.tokenizer, config.sandbox)
    for file in files:
        for row in JsonlTail(file).new_rows():
            episode = from_record(row, counter) if "turns" in row else from_trace(row, counter)
            if episode:
                yield replay.uncut(episode, calls_of(row))


def _model(config: Config, run: RunDirectory) -> Path:
    """The stage-1 model, else the base model: they share tokenizer and template."""
    try:
        return starting_model(config, run)
    except UserError:
        folder, cached = local_path(config.model), model_cache(config) / config.model
        for candidate in (folder, cached):
            if candidate.is_dir():
                return candidate
        raise UserError(f"Model {config.model} is not on this machine; name a folder with --model.") from None


def _half_made(run: RunDirectory) -> bool:
    """Whether stage 1 was ended while it made the traces; those to validate on come last."""
    unfinished = read_started(run.sft) and not read_manifest(run.sft)
    return bool(unfinished) and not (run.sft / "val_traces.jsonl").exists()


def _make_traces(args: argparse.Namespace) -> None:
    """Have stage 1 synthesise the traces of this run: stages meet on disk only."""
    options = ["--config", str(args.config), "--run-name", args.run_name]
    options += ["--profile", args.profile] if args.profile else []
    options += [part for override in args.overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "stage1_sft", "--traces-only", *options]
    status = subprocess.run(command, stdout=sys.__stderr__).returncode
    if status not in (0, _REFUSED) or not sources(resolve(args)[1]):
        raise UserError(
            f"Stage 1 did not make all traces to measure (exit status {status}); see its message above, then run the same "
            "command again."
        )


def _report(
    episodes: Sequence[EpisodeLengths],
    openings: dict[str, int],
    limits: Limits,
    config: Config,
    shape: ModelShape,
) -> Iterator[str]:
    yield f"measured {len(episodes)} episodes and the first prompts of {len(openings)} questions"
    yield f"{'tokens':<44}{'median':>8}{'95 %':>8}{'99 %':>8}{'most':>8}"
    for name, values in _measured(episodes, openings).items():
        yield f"{name:<44}" + "".join(f"{quantile(values, share):>8}" for share in (0.5, 0.95, 0.99, 1.0))
    yield ""
    yield f"{'does not fit':<44}{'settings now':>14}{'suggested':>14}"
    before, after = (overflow(episodes, openings, some) for some in (current(config), limits))
    for field in dataclasses.fields(before):
        shares = (getattr(some, field.name) for some in (before, after))
        yield f"{_OVERFLOWS[field.name]:<44}" + "".join(f"{share:>14.1%}" for share in shares)
    yield ""
    yield from _memory_lines(shape, _with_limits(config, limits))
    yield ""
    yield "suggested settings (now):"
    now = current(config).settings()
    for name, value in limits.settings().items():
        yield f"  --set {name}={value}".ljust(52) + (f"({now[name]})" if now[name] != value else "(as it is)")


_OVERFLOWS = {
    "prompts": "questions: first prompt too long, dropped",
    "turns": "episodes: more turns than agent.max_turns",
    "answers": "episodes: a turn is cut",
    "context": "episodes: end at the context limit",
    "rows": "episodes: their end is cut from the row",
    "any": "episodes: any of these four",
    "observations": "tool answers: shortened",
}


def _measured(episodes: Sequence[EpisodeLengths], openings: dict[str, int]) -> dict[str, list[int]]:
    uncut = [length for episode in episodes for length in episode.uncut or episode.observations]
    return {
        "first prompt": list(openings.values()),
        "answer of a turn": [answer for episode in episodes for answer in episode.answers],
        "tool answer, without a limit": uncut or [0],
        "prompt growth from turn to turn": [g for episode in episodes for g in episode.growths] or [0],
        "episode (last prompt and answer)": [episode.total for episode in episodes],
        "episode after its first prompt": [episode.total - episode.first_prompt for episode in episodes],
        "turns of an episode": [episode.turns for episode in episodes],
    }


def _memory_lines(shape: ModelShape, config: Config) -> Iterator[str]:
    block = memory.BLOCK_TOKENS[config.profile]
    blocks = wanted_blocks(config)
    gib = blocks * block * shape.kv_bytes / GIB
    yield (
        f"KV cache for {config.vllm.max_num_seqs} episodes at once (vllm.max_num_seqs): {blocks} blocks of {block} tokens, "
        f"{gib:.2f} GiB ({shape.kv_bytes} bytes a token)"
    )
    yield f"a checkpoint takes {memory.checkpoint_bytes(shape, config) / GIB:.2f} GiB, the run {memory.run_bytes(shape, config) / GIB:.2f} GiB of disk"
    yield f"with the suggested settings, {shape.parameters / 1e6:.0f} M weights (logits and activations estimated):"
    yield f"{'GPU':<10}{'KV blocks':>12}{'episodes at once':>18}{'tokens a pass':>16}{'rows a pass':>14}  fits"
    for card in memory.CARDS:
        fit = memory.fit(shape, config, card)
        yield (
            f"{f'{card} GB':<10}{fit.cache_blocks:>12}{fit.episodes:>18}{fit.pass_tokens:>16}{fit.rows:>14}  "
            f"{'yes' if fit.fits else 'no'}"
        )


def wanted_blocks(config: Config) -> int:
    """KV-cache blocks for vllm.max_num_seqs episodes that fill their context."""
    block = memory.BLOCK_TOKENS[config.profile]
    return config.vllm.max_num_seqs * -(-config.agent.context_tokens // block)


def _with_limits(config: Config, limits: Limits) -> Config:
    values = dataclasses.asdict(limits)
    sections = {
        name: section.model_copy(update={key: value for key, value in values.items() if hasattr(section, key)})
        for name, section in (("agent", config.agent), ("grpo", config.grpo), ("vllm", config.vllm))
    }
    return config.model_copy(update=sections)


def _values(
    episodes: Sequence[EpisodeLengths],
    openings: dict[str, int],
    limits: Limits,
    config: Config,
    shape: ModelShape,
) -> dict[str, Any]:
    planned = _with_limits(config, limits)
    cards = [memory.fit(shape, planned, card) for card in memory.CARDS]
    return {
        "episodes": len(episodes),
        "questions": len(openings),
        "measured": {
            name: {label: quantile(values, share) for label, share in (("median", 0.5), ("p95", 0.95), ("max", 1.0))}
            for name, values in _measured(episodes, openings).items()
        },
        "overflow_now": dataclasses.asdict(overflow(episodes, openings, current(config))),
        "overflow_suggested": dataclasses.asdict(overflow(episodes, openings, limits)),
        "kv_blocks": wanted_blocks(planned),
        "cards": [dataclasses.asdict(fit) for fit in cards],
        "set": limits.settings(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = common_parser("python -m stage2_grpo budget", _DESCRIPTION)
    parser.add_argument(
        "--model", type=Path, help="folder of tokenizer, template and sizes (default: as for the stage)"
    )
    parser.add_argument(
        "--share", type=float, default=0.99, help="of the episodes that must run to their end (default: 0.99)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser
