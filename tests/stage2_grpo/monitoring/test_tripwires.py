"""Tripwires over step rows: each fires on its fault and on nothing else; the best step and what is kept."""

from pathlib import Path
from typing import Any

import pytest

from shared.config.load import load_config
from stage2_grpo.monitoring.step_metrics import step_metrics
from stage2_grpo.monitoring.tripwires import best_step, kept_steps, tripped, validations_since_best

PIPELINE = Path(__file__).resolve().parents[3] / "pipeline.yaml"
CONFIG = load_config(PIPELINE, "cpu", ["safety.window=4"])
SAFETY = CONFIG.safety
HEALTHY: dict[str, Any] = {
    "episodes": 16.0,
    "loss": 0.01,
    "grad_norm": 0.5,
    "entropy": 0.4,
    "episode_tokens": 100.0,
    "tool_call_rate": 1.0,
    "mixed_groups": 0.5,
    "execution_accuracy": 0.5,
}


def rows(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": step, **HEALTHY, **change} for step, change in enumerate(changes, 1)]


def faulty(steps: int, **changes: Any) -> list[dict[str, Any]]:
    """Four healthy steps, then `steps` faulty ones."""
    return rows(*[{}] * 4, *[changes] * steps)


FAULTS = {
    "the entropy collapsed to 2%": {"entropy": 0.008},
    "the episodes grew to 5.0 times": {"episode_tokens": 500.0},
    "the tool-call rate fell to 50%": {"tool_call_rate": 0.5},
    "accuracy 0.0%), so there is nothing to learn": {"mixed_groups": 0.0, "execution_accuracy": 0.0},
    "accuracy 100.0%), so there is nothing to learn": {"mixed_groups": 0.0, "execution_accuracy": 1.0},
}


@pytest.mark.parametrize(("says", "fault"), FAULTS.items(), ids=FAULTS)
def test_a_fault_that_lasts_stops_the_run(says: str, fault: dict[str, Any]) -> None:
    assert tripped(faulty(3, **fault), SAFETY) is None
    trip = tripped(faulty(4, **fault), SAFETY)
    assert trip
    assert says in trip.sentence
    assert trip.since == 4  # step 5 is the first faulty one: it plays the policy that step 4 has saved


@pytest.mark.parametrize(
    "change",
    [{"entropy": 0.1}, {"episode_tokens": 350.0}, {"tool_call_rate": 0.8}, {"mixed_groups": 0.1}, {"entropy": None}],
    ids=str,
)
def test_a_change_within_the_limits_stops_nothing(change: dict[str, Any]) -> None:
    assert tripped(faulty(8, **change), SAFETY) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_step_that_is_no_number_stops_at_once(name: str, value: float) -> None:
    trip = tripped(faulty(1, **{name: value}), SAFETY.model_copy(update={"window": 0}))
    assert trip
    assert trip.sentence.startswith(f"the {name.replace('_', ' ')} of step 5 is {value}")
    assert trip.since == 5
    assert tripped([*faulty(1, **{name: value}), {"step": 6, **HEALTHY}], SAFETY) is None


def test_what_verl_writes_of_a_loss_that_is_no_number_is_one() -> None:
    trip = tripped([{"step": 1, **step_metrics({"actor/pg_loss": None, "actor/grad_norm": 0.1}, [], 1)}], SAFETY)
    assert trip
    assert trip.sentence.startswith("the loss of step 1 is nan")


def test_a_fault_that_was_there_from_the_start_is_no_drift() -> None:
    assert tripped(rows(*[{"tool_call_rate": 0.2}] * 9), SAFETY) is None


def test_without_a_window_only_numbers_count() -> None:
    assert tripped(faulty(9, mixed_groups=0.0), SAFETY.model_copy(update={"window": 0})) is None


def test_rows_of_a_validation_alone_are_no_steps() -> None:
    assert tripped([{"step": 0, "validation_execution_accuracy": 0.5}], SAFETY) is None


def validated(*accuracies: float | None) -> list[dict[str, Any]]:
    return [{"step": 4 * place, "validation_execution_accuracy": value} for place, value in enumerate(accuracies)]


def test_the_best_step_is_the_earliest_saved_one_of_highest_accuracy() -> None:
    history = validated(0.9, 0.3, 0.5, 0.5, None)
    assert best_step(history, [4, 8, 12, 16]) == 8
    assert best_step(history, [4, 16]) == 4
    assert best_step(history, [16]) is None


def test_patience_counts_the_validations_after_the_best_one() -> None:
    assert validations_since_best([]) == 0
    assert validations_since_best(validated(0.3, 0.5, 0.4, 0.5)) == 2
    again = [*validated(0.3, 0.5, 0.4), {"step": 8, "validation_execution_accuracy": 0.4}]
    assert validations_since_best(again) == 1  # a resumed run validates its first step once more


def test_the_newest_the_best_and_one_from_before_the_window_are_kept() -> None:
    saved = [2, 4, 6, 8, 10, 12]
    assert kept_steps(faulty(8), saved, CONFIG) == {6, 8, 10, 12, 0}
    assert kept_steps([*validated(0.1, 0.5), *faulty(8)], saved, CONFIG) == {4, 6, 8, 10, 12}
    assert kept_steps(faulty(1), [2], CONFIG) == {2, 0}


@pytest.mark.parametrize("skipped", [(), (9, 10, 21)], ids=str)
@pytest.mark.parametrize(
    ("window", "save_every", "keep"), [(8, 1, 1), (8, 2, 2), (8, 3, 1), (4, 1, 2), (4, 4, 1), (4, 16, 1)]
)
def test_a_run_that_trips_finds_a_checkpoint_from_before_the_fault_not_far_from_it(
    window: int, save_every: int, keep: int, skipped: tuple[int, ...]
) -> None:
    grpo = CONFIG.grpo.model_copy(update={"save_every": save_every, "keep_checkpoints": keep})
    config = CONFIG.model_copy(update={"grpo": grpo, "safety": SAFETY.model_copy(update={"window": window})})
    history: list[dict[str, Any]] = []
    saved: list[int] = []
    for step in [step for step in range(1, 60) if step not in skipped]:
        saved += [step] if step % save_every == 0 else []
        history.append({"step": step, **HEALTHY, "mixed_groups": 0.0})
        if trip := tripped(history, config.safety):
            good = max((step for step in saved if step < trip.since), default=0)
            assert good or trip.since <= save_every
            assert trip.since - good <= window + save_every + len(skipped)
        saved = sorted(kept_steps(history, saved, config) & {*saved})
        assert len(saved) <= keep + 2
