"""The readiness gate: before GRPO the start model plays training questions the way the rollouts will.

    gate/<mark>/{vllm.log,episodes.jsonl,sample_2/,…}   the probe: an evaluation, gate.samples times
    gate/<mark>/gate.json                                             its figures, and which samples of a question are right
    grpo/train.jsonl                                                  the questions that GRPO trains on

GRPO compares episodes of one question, so it needs a model that calls tools and is right sometimes, not always. A model
below the thresholds would cost a night and learn nothing. Questions that were always or never solved are
"flat": they teach nothing for now, and only a capped share of the training rows may be such. The built-in agent plays the
probe, whatever grpo.agent names.

`python -m stage2_grpo gate --model A --model B` probes several checkpoints of stage 1 and names the one to start from.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.cli.command_line import carry_out, common_parser
from shared.config.schema import Config, GateConfig
from shared.errors import UserError
from shared.evaluation.metrics import mean, percent
from shared.evaluation.run import evaluation_fingerprint, outcomes, play_model, read_summary, sample_folders
from shared.models.folder import check_model_folder
from shared.records import Question, read_questions
from shared.runs.manifest import RunDirectory, begin_stage, question_file, write_json

_DESCRIPTION = """Probes checkpoints of stage 1 the way the readiness gate of stage 2 does, with gate.samples episodes on each of
gate.questions training questions, and names the one to start GRPO from: the one that solves most questions at least once."""
GATE_FILE = "gate.json"
Outcomes = Mapping[str, Sequence[bool]]  # which samples of a question are right, by question id


@dataclass(frozen=True)
class Readiness:
    """What the probe says of a model; shares lie between 0 and 1."""

    questions: int
    samples: int
    pass_at_1: float  # accuracy of one episode
    pass_at_k: float  # questions with at least one right episode
    mixed_share: float  # questions with right and wrong episodes
    tool_call_rate: float  # episodes with a call that the stock Hermes grammar reads
    mean_turns: float


def main(arguments: Sequence[str]) -> None:
    """`python -m stage2_grpo gate`."""
    parser = common_parser("python -m stage2_grpo gate", _DESCRIPTION)
    parser.add_argument("--model", type=Path, action="append", required=True, help="merged checkpoint; may be repeated")
    args = parser.parse_args(arguments)
    carry_out(
        args,
        lambda config, run: plan(config, run, args.model),
        lambda config, run: compare(config, run, args.model),
    )


def training_questions(config: Config, run: RunDirectory, model: Path, questions: Sequence[Question]) -> list[Question]:
    """The questions to train on, after the gate; all of them without one. A finished probe of the same is read again.

    Raises UserError when the model is not ready.
    """
    if not config.gate.questions:
        return list(questions)
    readiness, solved = probed(config, run, model, questions[: config.gate.questions])
    print(f"grpo: gate  {readiness_line(readiness)}", flush=True)
    if sentence := shortfall(readiness, config.gate):
        raise UserError(sentence)
    kept = without_flat(questions, solved, config.gate.flat_share)
    if len(kept) < len(questions):
        print(f"grpo: {len(questions) - len(kept)} of {len(questions)} training questions left out (gate.flat_share)")
    return kept


def plan(config: Config, run: RunDirectory, models: Sequence[Path]) -> list[str]:
    """What `compare` would do, for --dry-run; raises UserError where there is nothing to compare."""
    for model in models:
        check_model_folder(model, "--model")
    if not config.gate.questions:
        raise UserError("The gate is off (gate.questions is 0); give it questions with --set gate.questions=32.")
    return [
        f"would probe {', '.join(map(str, models))} with {config.gate.questions} questions of {run.data / 'train.jsonl'}"
    ]


def compare(config: Config, run: RunDirectory, models: Sequence[Path]) -> Path:
    """Probe several checkpoints on the same questions; prints them with their verdicts and returns the readiest.

    Raises UserError when not even that one is ready.
    """
    plan(config, run, models)
    questions = list(read_questions(question_file(run, "train")))[: config.gate.questions]
    found = {model: probed(config, run, model, questions)[0] for model in models}
    for model, readiness in found.items():
        print(f"{readiness_line(readiness)}  {model}\n    {shortfall(readiness, config.gate) or 'ready'}")
    best = readiest(found, config.gate)
    if shortfall(found[best], config.gate):
        raise UserError(f"None of the {len(found)} checkpoints is ready for GRPO; what each lacks stands above.")
    print(f"SFT_MODEL_PATH={best}")
    return best


def readiest(found: Mapping[Path, Readiness], gate: GateConfig) -> Path:
    """The checkpoint with most to learn from: a ready one that solves most questions at least once, then with most mixed ones."""

    def rank(model: Path) -> tuple[bool, float, float]:
        readiness = found[model]
        return shortfall(readiness, gate) is None, readiness.pass_at_k, readiness.mixed_share

    return max(found, key=rank)


def probe_mark(config: Config, model: Path, questions: Sequence[Question]) -> str:
    """Fingerprint of all that the result of a probe depends on; not how fast it is played, nor the thresholds."""
    return evaluation_fingerprint(questions, _as_evaluation(config), model=model)


def _as_evaluation(config: Config) -> Config:
    """The settings of an evaluation that samples as the rollouts will."""
    evaluate = dataclasses.replace(
        config.evaluate,
        samples=config.gate.samples,
        temperature=config.grpo.temperature,
        concurrency=config.grpo.concurrency,
        bootstrap_samples=1,  # a probe has no interval, so its mark must not depend on it
    )
    return dataclasses.replace(config, evaluate=evaluate)


def probed(config: Config, run: RunDirectory, model: Path, questions: Sequence[Question]) -> tuple[Readiness, Outcomes]:
    """The result of the probe, played unless it is there; an interrupted one is continued."""
    mark = probe_mark(config, model, questions)
    folder = run.path / "gate" / mark[:12]
    file = folder / GATE_FILE
    saved = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if saved.get("fingerprint") == mark:
        return Readiness(**saved["readiness"]), saved["solved"]
    begin_stage(folder, mark)
    readiness, solved = probe(config, folder, model, questions)
    write_json(file, {"fingerprint": mark, "readiness": dataclasses.asdict(readiness), "solved": solved})
    return readiness, solved


def probe(config: Config, folder: Path, model: Path, questions: Sequence[Question]) -> tuple[Readiness, Outcomes]:
    """Play the questions with the sampling of the rollouts; the figures, and which samples of a question are right."""
    print(f"probing {model}: {len(questions)} training questions x {config.gate.samples} episodes", flush=True)
    play_model(model, questions, _as_evaluation(config), folder)
    folders = sample_folders(folder, config.gate.samples)
    solved = outcomes(questions, folders)
    summaries = [read_summary(each) for each in folders]
    rates, turns = ([summary[name] or 0.0 for summary in summaries] for name in ("tool_call_rate", "mean_turns"))
    return readiness_of(solved, mean(rates) or 0.0, mean(turns) or 0.0), solved


def readiness_of(solved: Outcomes, tool_call_rate: float, mean_turns: float) -> Readiness:
    """The figures of a probe; a question counts when it has all its samples."""
    samples = max((len(right) for right in solved.values()), default=0)
    return Readiness(
        questions=len(solved),
        samples=samples,
        pass_at_1=mean(float(one) for right in solved.values() for one in right) or 0.0,
        pass_at_k=mean(float(any(right)) for right in solved.values()) or 0.0,
        mixed_share=mean(float(not _flat(right)) for right in solved.values()) or 0.0,
        tool_call_rate=tool_call_rate,
        mean_turns=mean_turns,
    )


def readiness_line(readiness: Readiness) -> str:
    """The probe as one line."""
    return (
        f"pass@1 {percent(readiness.pass_at_1)}  pass@{readiness.samples} {percent(readiness.pass_at_k)}  mixed "
        f"groups {percent(readiness.mixed_share)}  tool calls {percent(readiness.tool_call_rate)}  turns "
        f"{readiness.mean_turns:.1f}  questions {readiness.questions}"
    )


def shortfall(readiness: Readiness, gate: GateConfig) -> str | None:
    """Why the model is not ready and what to do, the deepest cause first; None when it is."""
    start = "The start model is not ready for GRPO:"
    more_sft = (
        "train stage 1 longer (sft.epochs, sft.max_traces) or start from another checkpoint, or lower the threshold"
    )
    if readiness.tool_call_rate < gate.min_tool_calls:
        return (
            f"{start} only {percent(readiness.tool_call_rate)} of its episodes call a tool (gate.min_tool_calls "
            f"{gate.min_tool_calls}); {more_sft}."
        )
    if readiness.mean_turns < gate.min_turns:
        return (
            f"{start} its episodes have {readiness.mean_turns:.1f} turns (gate.min_turns {gate.min_turns}); {more_sft}."
        )
    if readiness.pass_at_k < gate.min_pass:
        return (
            f"{start} {readiness.samples} episodes solve only {percent(readiness.pass_at_k)} of the questions (gate.min_pass "
            f"{gate.min_pass}); bring easier questions, {more_sft}."
        )
    if readiness.mixed_share < gate.min_mixed:
        return (
            f"{start} only {percent(readiness.mixed_share)} of the questions have right and wrong episodes (gate.min_mixed "
            f"{gate.min_mixed}, pass@1 {percent(readiness.pass_at_1)}), and GRPO learns from no others; bring "
            f"{'harder' if readiness.pass_at_1 > 0.5 else 'easier'} questions, raise grpo.temperature, or lower the threshold."
        )
    return None


def without_flat(questions: Sequence[Question], solved: Outcomes, share: float) -> list[Question]:
    """The questions in order, without the last flat ones beyond `share` of what is kept; unprobed ones are not flat."""
    flat = {question.id for question in questions if question.id in solved and _flat(solved[question.id])}
    room = int(share * (len(questions) - len(flat)) / (1 - share))
    kept_flat = set([question.id for question in questions if question.id in flat][:room])
    return [question for question in questions if question.id not in flat or question.id in kept_flat]


def _flat(right: Sequence[bool]) -> bool:
    return len(set(right)) == 1
