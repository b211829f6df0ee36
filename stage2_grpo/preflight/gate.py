"""The readiness gate: before GRPO the start model plays training questions the way the rollouts will.

    gate/<mark>/{vllm.log,episodes.jsonl,sample_2/,…}   the probe: an evaluation, gate.samples times
    gate/<mark>/gate.json                               its figures, and which samples of a question are right

GRPO compares episodes of one question, so it needs a model that calls tools and is right sometimes, not always. A
model below the thresholds would learn nothing. Questions that the probe always or never solves are "flat": they teach
nothing for now, so at most gate.flat_share of the training rows may be flat. The built-in agent plays the probe,
whatever grpo.agent names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from shared.cli.command_line import carry_out, common_parser
from shared.config.schema import Config, GateConfig
from shared.errors import UserError
from shared.evaluation.metrics import mean, percent
from shared.evaluation.run import evaluation_fingerprint, outcomes, play_model, read_summary, sample_folders
from shared.models.folder import check_model_folder
from shared.records import Question, read_questions
from shared.runs.manifest import RunDirectory, begin_stage, question_file, read_object, write_json

_DESCRIPTION = """Probes checkpoints of stage 1 the way the readiness gate of stage 2 does, with gate.samples episodes
on each of gate.questions training questions, and names the one to start GRPO from: the one that solves most questions
at least once."""
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

    def __str__(self) -> str:
        return (
            f"pass@1 {percent(self.pass_at_1)}  pass@{self.samples} {percent(self.pass_at_k)}  mixed groups "
            f"{percent(self.mixed_share)}  tool calls {percent(self.tool_call_rate)}  turns {self.mean_turns:.1f}  "
            f"questions {self.questions}"
        )


def main(arguments: Sequence[str]) -> None:
    """`python -m stage2_grpo gate`."""
    parser = common_parser("python -m stage2_grpo gate", _DESCRIPTION)
    parser.add_argument("--model", type=Path, action="append", required=True, help="merged checkpoint; may be repeated")
    args = parser.parse_args(arguments)
    carry_out(args, partial(plan, models=args.model), partial(compare, models=args.model))


def training_questions(config: Config, run: RunDirectory, model: Path, questions: Sequence[Question]) -> list[Question]:
    """The questions to train on, after the gate; all of them without one. A finished probe of the same is read again.

    Raises UserError when the model is not ready.
    """
    if not config.gate.questions:
        return list(questions)
    readiness, solved = probe(config, run, model, questions[: config.gate.questions])
    print(f"grpo: gate  {readiness}", flush=True)
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
    named = ", ".join(map(str, models))
    return [f"would probe {named} with {config.gate.questions} questions of {run.data / 'train.jsonl'}"]


def compare(config: Config, run: RunDirectory, models: Sequence[Path]) -> Path:
    """Probe checkpoints on the same questions, print their verdicts, return the ready one that solves most questions.

    Among equals the one with most mixed questions. Raises UserError when none is ready.
    """
    plan(config, run, models)
    questions = list(read_questions(question_file(run, "train")))[: config.gate.questions]
    found = {model: probe(config, run, model, questions)[0] for model in models}
    for model, readiness in found.items():
        print(f"{readiness}  {model}\n    {shortfall(readiness, config.gate) or 'ready'}")
    ready = {model: readiness for model, readiness in found.items() if not shortfall(readiness, config.gate)}
    if not ready:
        raise UserError(f"None of the {len(found)} checkpoints is ready for GRPO; what each lacks stands above.")
    best = max(ready, key=lambda model: (ready[model].pass_at_k, ready[model].mixed_share))
    print(f"SFT_MODEL_PATH={best}")
    return best


def probe_settings(config: Config) -> Config:
    """The settings of an evaluation that samples as the rollouts will; its fingerprint identifies a probe."""
    sampled = {
        "samples": config.gate.samples,
        "temperature": config.grpo.temperature,
        "concurrency": config.grpo.concurrency,
        "bootstrap_samples": 1,  # a probe has no interval, so its fingerprint must not depend on it
    }
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=sampled)})


def probe(config: Config, run: RunDirectory, model: Path, questions: Sequence[Question]) -> tuple[Readiness, Outcomes]:
    """The figures of a probe and which samples of a question are right, played unless that was done before."""
    settings = probe_settings(config)
    mark = evaluation_fingerprint(questions, settings, model=model)
    folder = run.path / "gate" / mark[:12]
    saved = read_object(folder / GATE_FILE)
    if saved.get("fingerprint") == mark:
        return Readiness(**saved["readiness"]), saved["solved"]
    check_model_folder(model, "the probed model")
    begin_stage(folder, mark)  # keeps what an interrupted probe has played
    print(f"probing {model}: {len(questions)} training questions x {config.gate.samples} episodes", flush=True)
    play_model(model, questions, settings, folder)
    folders = sample_folders(folder, config.gate.samples)
    solved = outcomes(questions, folders)
    summaries = [read_summary(each) for each in folders]
    rates, turns = (mean(summary[name] or 0.0 for summary in summaries) for name in ("tool_call_rate", "mean_turns"))
    readiness = readiness_of(solved, rates or 0.0, turns or 0.0)
    write_json(folder / GATE_FILE, {"fingerprint": mark, "readiness": asdict(readiness), "solved": solved})
    return readiness, solved


def readiness_of(solved: Outcomes, tool_call_rate: float, mean_turns: float) -> Readiness:
    """The figures of a probe; a question counts when it has all its samples."""
    return Readiness(
        questions=len(solved),
        samples=max((len(right) for right in solved.values()), default=0),
        pass_at_1=mean(float(one) for right in solved.values() for one in right) or 0.0,
        pass_at_k=mean(float(any(right)) for right in solved.values()) or 0.0,
        mixed_share=mean(float(len(set(right)) > 1) for right in solved.values()) or 0.0,
        tool_call_rate=tool_call_rate,
        mean_turns=mean_turns,
    )


def shortfall(readiness: Readiness, gate: GateConfig) -> str | None:
    """Why the model is not ready and what to do, the deepest cause first; None when it is."""
    longer = (
        "train stage 1 longer (sft.epochs, sft.max_traces) or start from another checkpoint, or lower the threshold"
    )
    harder = "harder" if readiness.pass_at_1 > 0.5 else "easier"
    if readiness.tool_call_rate < gate.min_tool_calls:
        rate = percent(readiness.tool_call_rate)
        lack = f"only {rate} of its episodes call a tool (gate.min_tool_calls {gate.min_tool_calls})"
    elif readiness.mean_turns < gate.min_turns:
        lack = f"its episodes have {readiness.mean_turns:.1f} turns (gate.min_turns {gate.min_turns})"
    elif readiness.pass_at_k < gate.min_pass:
        solved = percent(readiness.pass_at_k)
        lack = f"{readiness.samples} episodes solve only {solved} of the questions (gate.min_pass {gate.min_pass})"
        longer = f"bring easier questions, {longer}"
    elif readiness.mixed_share < gate.min_mixed:
        lack = (
            f"only {percent(readiness.mixed_share)} of the questions have right and wrong episodes (gate.min_mixed "
            f"{gate.min_mixed}, pass@1 {percent(readiness.pass_at_1)}), and GRPO learns from no others"
        )
        longer = f"bring {harder} questions, raise grpo.temperature, or lower the threshold"
    else:
        return None
    return f"The start model is not ready for GRPO: {lack}; {longer}."


def without_flat(questions: Sequence[Question], solved: Outcomes, share: float) -> list[Question]:
    """The questions in order, without the last flat ones beyond `share` of what is kept; unprobed ones are not flat."""
    flat = [question.id for question in questions if len(set(solved.get(question.id, ()))) == 1]
    dropped = set(flat[int(share * (len(questions) - len(flat)) / (1 - share)) :])
    return [question for question in questions if question.id not in dropped]
