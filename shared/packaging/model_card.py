"""The model card: what the model is, how it was made, what it reaches and where it ends, from the run's report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from shared.errors import UserError
from shared.records import read_questions
from shared.report.__main__ import MODELS, outcome
from shared.runs.manifest import RunDirectory, question_file, read_object

_LICENSES = {"smollm2-135m": "apache-2.0", "Qwen/Qwen2.5-Coder-1.5B-Instruct": "apache-2.0"}
_BASES = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_STAGES = {
    "sft": "stage 1: LoRA SFT on executed tool-call traces",
    "grpo": "stage 1: LoRA SFT on executed tool-call traces; stage 2: GRPO on rollouts of the real agent",
}
_RECIPE = {
    "sft": ("max_traces", "epochs", "learning_rate", "lora_rank", "batch_size", "rounds"),
    "grpo": ("train_batch_size", "rollouts_per_question", "learning_rate", "lora_rank", "loss_average"),
}


def model_card(model: Path) -> str:
    """The card of a trained model as Markdown with its YAML head.

    `model` is the folder that a training stage of a run wrote. Raises UserError when the run has no report yet.
    """
    run = RunDirectory(model.resolve().parent.parent)
    stage = model.resolve().parent.name
    report = run.report / "report.json"
    if stage not in _STAGES or not report.is_file():
        raise UserError(
            f"{model} belongs to no run with a report, and the model card is made from that; run the pipeline's report "
            f"stage (--only report --run-name {run.path.name}) or name the model of another run."
        )
    facts: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    licence = _LICENSES.get(facts["model"], "other")
    base = _BASES.get(facts["model"], facts["model"])
    on_a_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", base) is not None and not Path(base).exists()
    if not on_a_hub:
        base = Path(base).name  # where a folder lies is nobody else's business
    facts["model"] = base
    summaries = {one["name"]: one["summary"] for one in facts["models"]}
    summary = summaries.get(stage)
    head = ModelCardData(
        model_name=f"{run.path.name}-{stage}",
        base_model=base if on_a_hub else None,
        license=licence,
        license_name=None if licence != "other" else "that-of-the-base-model",
        language="en",
        tags=["text-to-sql", "tool-use", "agent", "grpo" if stage == "grpo" else "sft"],
        eval_results=_results(summary) if summary else None,
    )
    settings = read_object(run.path / "config.json")
    recipe = [
        f"- {part}.{name}: {settings[part][name]}"
        for part in (("sft", "grpo") if stage == "grpo" else ("sft",))
        for name in _RECIPE[part]
        if name in (settings.get(part) or {})
    ]
    train, test = (sum(1 for _ in read_questions(question_file(run, split))) for split in ("train", "test"))
    sources = [Path(source["path"]).name for source in (settings.get("data") or {}).get("sources", ())]
    levels = summary["accuracy_by"].get("difficulty", {}) if summary else {}
    by_level = "; ".join(f"{level} questions {found['mean']:.0%}" for level, found in levels.items())
    sections = [
        f"---\n{head}\n---",
        f"# {run.path.name}: {MODELS[stage]}",
        f"A tool-calling agent that answers questions about a SQLite database, trained from {base} ({_STAGES[stage]}). "
        "It calls `search_schema`, `get_columns` and `execute_sql` in Hermes format (`<tool_call>`).",
        "## Results",
        outcome(facts),
        "## Data",
        f"Training questions: {train}; test questions: {test}. Sources: {', '.join(sources)}. No test question and no "
        "database named unseen was part of the training.",
        "## Recipe",
        "\n".join(recipe),
        "## Limits",
        "The model writes SQLite's dialect and reads English questions. An answer can be wrong although its query "
        "runs: read the query, and run it in a read-only sandbox. "
        + (f"Right answers: {by_level}." if by_level else ""),
        "## License",
        f"The license of the base model applies: {licence if licence != 'other' else f'see {base}'}.",
    ]
    return "\n\n".join(sections) + "\n"


def _results(summary: dict[str, Any]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="firstcall-test",
            dataset_name=f"held-out questions of the run ({summary['n']})",
            metric_type="execution_accuracy",
            metric_value=round(summary["accuracy"]["mean"], 4),
        )
    ]
