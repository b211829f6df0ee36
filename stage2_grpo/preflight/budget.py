"""`python -m stage2_grpo budget`: the memory that the settings take, and the limits that the episodes of a run need.

An episode is its first prompt, then turn after turn what the model writes (end-of-turn token included) and what comes
back (observations and the template's markup around them).

The traces of stage 1 are an expert's, and a policy that explores takes wrong turns. So the context gets room for two
turns more than the longest expert needs, and a turn half as much again as the longest expert's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.agent.prompts import prompts_of
from shared.cli.command_line import common_parser, resolve
from shared.config.device import find_gpus
from shared.config.load import load_config
from shared.config.schema import AgentConfig, Config
from shared.errors import UserError
from shared.models.chat_template import ChatTemplate
from shared.models.folder import check_model_folder
from shared.models.shape import ModelShape, read_shape
from shared.models.tokenizer import Tokenizer
from shared.records import JsonlTail, Message, read_questions
from shared.runs.manifest import RunDirectory, question_file, read_manifest, read_started
from stage2_grpo.inputs import planned_model
from stage2_grpo.preflight import memory
from stage2_grpo.preflight.memory import GIB

_DESCRIPTION = """Prints the memory that a run takes on a GPU, line by line, and what fits cards of 16 to 80 GB.
Measures, with the model's tokenizer, the traces of stage 1 and the recorded episodes of a run, and derives the limits
of prompts, episodes and rows. Ends with the --set lines to use; changes no setting."""
LIMITS = ("agent.max_turns", "agent.max_turn_tokens", "agent.context_tokens")
Limits = Mapping[str, int]
"""Settings that bound an episode, by their dotted names."""
_SHARE = 0.99  # of the episodes that the limits let run to their end
_EXTRA_TURNS = 2
_TURN_HEADROOM = 1.5


def main(arguments: Sequence[str]) -> None:
    """Compute the memory, measure the episodes if there are any, and print."""
    parser = common_parser("python -m stage2_grpo budget", _DESCRIPTION)
    args = parser.parse_args(arguments)
    config, run = resolve(args)
    files = sources(run)
    if args.dry_run:
        named = ", ".join(map(str, files))
        print(f"would measure {named or f'the traces of {run.sft}, which are not there yet'}")
        return
    model, _ = planned_model(config, run)
    check_model_folder(model, "the measured model")
    if files:
        limits, lines = measured(config, run, files, model)
    else:
        limits = current(config)
        lines = [
            f"{run.sft} holds no traces to measure, so the lengths are those of the settings; `python -m stage1_sft "
            f"--traces-only --profile {config.profile} --run-name {run.path.name}` makes some (no training)."
        ]
    suggested = load_config(
        args.config, config.profile, [*args.overrides, *(f"{name}={value}" for name, value in limits.items())]
    )
    print("\n".join([*_memory_lines(read_shape(model), suggested), "", *lines]))


def measured(config: Config, run: RunDirectory, files: Sequence[Path], model: Path) -> tuple[dict[str, int], list[str]]:
    """The limits for what was measured in `files`, and the lines that show it beside what does not fit.

    Raises UserError when stage 1 is still writing its traces, or no file holds an episode.
    """
    if read_started(run.sft) and not read_manifest(run.sft) and not (run.sft / "val_traces.jsonl").exists():
        raise UserError(
            f"{run.sft} holds only half of the traces; run `python -m stage1_sft --traces-only --profile "
            f"{config.profile} --run-name {run.path.name}` first (no training)."
        )
    questions = [one for split in ("train", "val", "test") for one in read_questions(question_file(run, split))]
    counter = Counter(model, config.agent)
    openings = [counter.opening(question.question) for question in questions]
    episodes = list(measure(files, counter))
    if not episodes:
        raise UserError(f"{', '.join(map(str, files))} hold no episode; run `python -m stage1_sft --traces-only`.")
    now, limits = current(config), derive(episodes, openings, _SHARE)
    lengths = {
        "first prompt": openings,
        "answer of a turn": [answer for episode in episodes for answer in episode.answers],
        "prompt growth from turn to turn": [growth for episode in episodes for growth in episode.growths],
        "episode (last prompt and answer)": [episode.total for episode in episodes],
        "turns of an episode": [len(episode.answers) for episode in episodes],
    }
    lines = [f"measured {len(episodes)} episodes and the first prompts of {len(questions)} questions with {model}"]
    lines += [f"{'tokens':<44}{'median':>8}{'95 %':>8}{'99 %':>8}{'most':>8}"]
    for name, values in lengths.items():
        lines += [f"{name:<44}" + "".join(f"{quantile(values, share):>8}" for share in (0.5, 0.95, 0.99, 1.0))]
    lines += ["", f"{'does not fit':<44}{'settings now':>14}{'suggested':>14}"]
    cut, left = (overflow(episodes, openings, each) for each in (now, limits))
    lines += [f"{name:<44}{cut[name]:>14.1%}{left[name]:>14.1%}" for name in cut]
    lines += ["", "suggested settings (now), for which the memory above is computed:"]
    for name, value in limits.items():
        was = f"({now[name]})" if now[name] != value else "(as it is)"
        lines += [f"  --set {name}={value}".ljust(52) + was]
    return limits, lines


@dataclass(frozen=True)
class EpisodeLengths:
    """Tokens of one episode. `growths[i]`: what the prompt gains from turn i to i + 1 besides turn i's answer."""

    first_prompt: int
    answers: tuple[int, ...]  # one per turn
    growths: tuple[int, ...]  # one fewer

    @property
    def total(self) -> int:
        """The context that the episode needs."""
        return self.first_prompt + sum(self.answers) + sum(self.growths)


class Counter:
    """Counts conversations as the server will: with chat template and tokenizer of a model folder, and the tools."""

    def __init__(self, folder: Path, agent: AgentConfig) -> None:
        self.agent, self._prompts = agent, prompts_of(agent)
        self.tokenizer = Tokenizer.from_folder(folder)
        self._template = ChatTemplate.from_folder(folder)
        self._end = self._template.special_tokens.get("eos_token", "")

    def opening(self, question: str) -> int:
        """Tokens of the first prompt for a question."""
        return self.tokenizer.count(
            self._template.render(self._prompts.opening(question), self._prompts.tools, prompt=True)
        )

    def prompts_and_answers(self, messages: Sequence[Message]) -> list[tuple[int, int]]:
        """Tokens of prompt and answer of each turn; what the template writes after an answer is the next prompt's."""
        counts = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._template.render(messages[:i], self._prompts.tools, prompt=True)
                text = self._template.render(messages[: i + 1], self._prompts.tools)[len(prompt) :]
                if self._end in text:
                    text = text[: text.rfind(self._end) + len(self._end)]
                counts.append((self.tokenizer.count(prompt), self.tokenizer.count(text)))
        return counts


def measure(files: Iterable[Path], counter: Counter) -> Iterator[EpisodeLengths]:
    """The lengths of all episodes in traces and recordings."""
    for row in (row for file in files for row in JsonlTail(file).new_rows()):
        if counts := counter.prompts_and_answers(row["messages"]):
            prompts, answers = zip(*counts, strict=True)
            growths = tuple(
                after - before - answer for (before, answer), after in zip(counts, prompts[1:], strict=False)
            )
            yield EpisodeLengths(prompts[0], answers, growths)


def derive(episodes: Sequence[EpisodeLengths], openings: Sequence[int], share: float) -> dict[str, int]:
    """Limits under which `share` (0 to 1) of the measured episodes run to their end.

    `openings` are the first-prompt tokens of all questions of the run: none of them may be too long.
    """
    answers = [answer for episode in episodes for answer in episode.answers]
    growth = quantile([growth for episode in episodes for growth in episode.growths], share)
    answer = _up(_TURN_HEADROOM * quantile([max(episode.answers) for episode in episodes], share))
    needed = quantile([episode.total for episode in episodes], share)
    more = _EXTRA_TURNS * (quantile(answers, share) + growth)
    turns = quantile([len(episode.answers) for episode in episodes], share) + _EXTRA_TURNS
    return dict(zip(LIMITS, (turns, answer, _up(max(needed + more, max(openings) + answer + growth))), strict=True))


def current(config: Config) -> dict[str, int]:
    """The limits that the settings hold now."""
    return {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in LIMITS}


def overflow(episodes: Sequence[EpisodeLengths], openings: Sequence[int], limits: Limits) -> dict[str, float]:
    """Shares (0 to 1) of questions and episodes that do not fit."""
    turns, turn, context = (limits[name] for name in LIMITS)
    faults = {
        "episodes: more turns than agent.max_turns": [len(episode.answers) > turns for episode in episodes],
        "episodes: a turn is cut": [max(episode.answers) > turn for episode in episodes],
        "episodes: end at the context limit": [episode.total > context for episode in episodes],
    }
    shares = {
        "questions: first prompt too long, dropped": [opening >= context for opening in openings],
        **faults,
        "episodes: any of these three": [any(row) for row in zip(*faults.values(), strict=True)],
    }
    return {name: sum(flags) / max(1, len(flags)) for name, flags in shares.items()}


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed (nearest rank); 0 of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0


def _up(value: float) -> int:
    """The next multiple of 32."""
    return 32 * math.ceil(value / 32)


def sources(run: RunDirectory) -> list[Path]:
    """The traces, also those that the limits leave out, and the recorded episodes that a run has."""
    files = [run.sft / f"{name}{kind}.jsonl" for name in ("traces", "val_traces") for kind in ("", ".too_long")]
    files += [run.evaluation(who) / "episodes.jsonl" for who in ("sft", "grpo")]  # the base model's end without a call
    return [file for file in files if file.exists() and file.stat().st_size]


def _memory_lines(shape: ModelShape, config: Config) -> Iterator[str]:
    sizes = [gpu.gib for gpu in find_gpus() if gpu.gib]
    cards = {name: memory.fit(shape, config, gib) for name, gib in memory.CARDS.items()}
    shown = memory.fit(shape, config, min(sizes)) if sizes else cards[memory.MADE_FOR[config.profile]]
    yield f"{shape.parameters / 1e6:.0f} M weights, profile {config.profile}; computed, not measured"
    if config.device == "gpu":
        yield f"\nGiB on {'this' if sizes else 'a'} card of {shown.gib:.1f} GiB ({shown.usable:.1f} of them usable):"
        for moment, parts in shown.moments.items():
            yield f"  {moment:<56}{shown.needed(moment):>8.2f}"
            yield from (f"    {name:<54}{gib:>8.2f}" for name, gib in parts.items() if gib)
    yield f"\n{'GiB needed while':<10}" + "".join(f"{moment:>18}" for moment in shown.moments) + "  episodes  fits"
    for name, card in cards.items():
        needed = "".join(f"{card.needed(moment):>18.1f}" for moment in card.moments)
        yield f"{f'{name} GB card':<16}{needed}{card.episodes:>10}  {'yes' if card.fits else 'no'}"
    block = memory.BLOCK_TOKENS[config.device]
    blocks = config.vllm.max_num_seqs * -(-config.agent.context_tokens // block)
    yield (
        f"\nKV cache for {config.vllm.max_num_seqs} episodes at once (vllm.max_num_seqs): {blocks} blocks of {block} "
        f"tokens, {blocks * block * shape.kv_bytes / GIB:.2f} GiB ({shape.kv_bytes} bytes a token)"
    )
    run = memory.run_bytes(shape, config) / GIB
    yield f"a checkpoint takes {memory.checkpoint_bytes(shape, config) / GIB:.2f} GiB, the run {run:.2f} GiB of disk"
    yield f"main memory: about {memory.main_memory(shape, config) / GIB:.0f} GiB"
