"""Split questions into train, val and test without leakage.

Some databases are held out as a whole ("unseen_database" tests); the questions of the others are dealt to train, val
and test. Questions that share a text or a gold (paraphrases) form one group and stay together, across databases and
sources too: a group that touches a held-out database or a source for the test alone is test only, and the questions
that another source gives for training alone are left out of it. Any prefix of a split is balanced.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, zip_longest

import networkx

from data.questions import keys
from data.sql_form import DIFFICULTIES
from shared.config.schema import DataConfig, DataSource
from shared.errors import UserError
from shared.records import Question

SEEN, UNSEEN = "seen_database", "unseen_database"
_MOST_HELD_OUT = 1 / 3  # of the databases, and of the questions


class LeakageError(Exception):
    """Two splits share something they must not; the message names the question ids."""


@dataclass
class Splits:
    """The questions of each split, and the databases that only the test asks about."""

    train: list[Question] = field(default_factory=list)
    val: list[Question] = field(default_factory=list)
    test: list[Question] = field(default_factory=list)
    unseen: set[str] = field(default_factory=set)
    removed: int = 0  # questions in no split, because the test or a source to avoid holds them too

    def items(self) -> tuple[tuple[str, list[Question]], ...]:
        """Name and questions of each split."""
        return ("train", self.train), ("val", self.val), ("test", self.test)


def make_splits(
    questions: Sequence[Question],
    data: DataConfig,
    seed: int,
    sizes: Mapping[str, int],
    origins: Mapping[str, DataSource] | None = None,
    avoided: Set[tuple[str, str]] = frozenset(),
) -> Splits:
    """Split the questions; `sizes` holds the bytes of each database, so that small and large ones are held out alike.

    `origins` holds the source of a question id; without one it is split by the shares. Questions with one of the
    `avoided` keys leave train and val. Raises UserError when the settings leave a split empty or name an unknown
    database.
    """
    rng = random.Random(f"splits.{seed}")
    origins = origins or {}
    uses = {q.id: origins[q.id].use if q.id in origins else "split" for q in questions}
    splits = Splits(unseen=_hold_out(questions, uses, data.unseen_databases, sizes, rng))
    dealt: dict[str, list[list[Question]]] = defaultdict(list)
    for group in paraphrase_groups(questions):
        if any(question.db_id in splits.unseen or uses[question.id] == "test" for question in group):
            splits.test += [question for question in group if uses[question.id] != "train"]
        else:
            dealt[group[0].db_id].append(group)
    for db_id in sorted(dealt):
        _deal(dealt[db_id], data, rng, splits, uses)
    for split in (splits.train, splits.val):
        split[:] = [question for question in split if avoided.isdisjoint(keys(question))]
    splits.removed = len(questions) - sum(len(split) for _, split in splits.items())
    needed = {"train": True, "val": data.val_share > 0, "test": data.test_share > 0 or data.unseen_databases != 0}
    for name, chosen in splits.items():
        if needed[name] and not chosen:
            also = f" after {splits.removed} were removed, which the test or a source to avoid holds too" * (
                splits.removed > 0
            )
            raise UserError(
                f"The {name} split of {len(questions)} questions is empty{also}; add questions (20 on one database are "
                "enough), or change data.sources, data.unseen_databases, data.test_share or data.val_share."
            )
    splits.train, splits.val = _spread(splits.train, rng), _spread(splits.val, rng)
    labelled = [replace(q, split_kind=UNSEEN if q.db_id in splits.unseen else SEEN) for q in splits.test]
    kinds = [_spread([q for q in labelled if q.split_kind == kind], rng) for kind in (UNSEEN, SEEN)]
    splits.test = [question for pair in zip_longest(*kinds) for question in pair if question]
    if any(source.weight for source in origins.values()):
        splits.train = _spread(_weigh(splits.train, origins), rng)
    return splits


def _hold_out(
    questions: Sequence[Question],
    uses: Mapping[str, str],
    wanted: int | tuple[str, ...],
    sizes: Mapping[str, int],
    rng: random.Random,
) -> set[str]:
    """Names of the databases that only the test asks about: those of the setting, and those of test sources alone."""
    only_tested = set(sizes) - {question.db_id for question in questions if uses[question.id] != "test"}
    if isinstance(wanted, tuple):
        if unknown := sorted(set(wanted) - set(sizes)):
            raise UserError(
                f"Setting data.unseen_databases names {', '.join(unknown)}, which no source has; choose among "
                f"{', '.join(sorted(sizes))}."
            )
        return only_tested | set(wanted)
    trained = {question.db_id for question in questions if uses[question.id] == "train"}
    free = {name: size for name, size in sizes.items() if name not in trained | only_tested}
    counts = Counter(question.db_id for question in questions if question.db_id in free)
    return only_tested | choose_unseen(free, counts, max(0, wanted - len(only_tested)), rng)


def choose_unseen(sizes: Mapping[str, int], questions: Mapping[str, int], wanted: int, rng: random.Random) -> set[str]:
    """Names of the held-out databases, one from each of equal ranges of size.

    At most `wanted` databases, and at most a third of the databases and of the questions: training needs the rest.
    """
    count = min(wanted, int(len(sizes) * _MOST_HELD_OUT))
    ordered = sorted(sizes, key=lambda name: (sizes[name], name))
    bounds = [len(ordered) * i // count for i in range(count + 1)] if count else []
    unseen = {rng.choice(ordered[low:high]) for low, high in pairwise(bounds)}
    while sum(questions[name] for name in unseen) > sum(questions.values()) * _MOST_HELD_OUT:
        unseen.remove(max(unseen, key=lambda name: (questions[name], name)))
    return unseen


def paraphrase_groups(questions: Sequence[Question]) -> list[list[Question]]:
    """Connected components of "same question text or same gold", in order of their first question."""
    shared = networkx.Graph()
    for index, question in enumerate(questions):
        shared.add_edges_from((index, key) for key in keys(question))
    groups = (
        sorted(node for node in group if isinstance(node, int)) for group in networkx.connected_components(shared)
    )
    return [[questions[index] for index in group] for group in sorted(groups)]


def leakage_check(train: Sequence[Question], val: Sequence[Question], test: Sequence[Question]) -> None:
    """Raises LeakageError when splits share a question text or a gold, or training uses an unseen database."""
    owner: dict[tuple[str, str], tuple[str, str]] = {}
    problems = []
    for split, questions in (("train", train), ("val", val), ("test", test)):
        for question in questions:
            for key in keys(question):
                other, identity = owner.setdefault(key, (split, question.id))
                if other != split:
                    problems.append(f"{identity} ({other}) and {question.id} ({split}) share the same {key[0]}")
    trained = {question.db_id: question.id for question in chain(train, val)}
    for question in test:
        if question.split_kind == UNSEEN and question.db_id in trained:
            problems.append(f"{trained[question.db_id]} trains on {question.db_id}, unseen by {question.id} (test)")
    if problems:
        raise LeakageError(f"{len(problems)} leaks between splits: " + "; ".join(problems[:20]))


def _deal(
    groups: list[list[Question]], data: DataConfig, rng: random.Random, splits: Splits, uses: Mapping[str, str]
) -> None:
    """Deal one database's groups by difficulty and form: each split gets a group when its share is due.

    Groups with a question for training alone stay out of the test.
    """
    rng.shuffle(groups)
    groups.sort(key=lambda group: ((*DIFFICULTIES, "unknown").index(group[0].difficulty), group[0].form))
    test_owed, val_owed = rng.random(), rng.random()
    for group in groups:
        trains = any(uses[question.id] == "train" for question in group)
        test_owed += 0 if trains else data.test_share * len(group)
        val_owed += data.val_share * len(group)
        if test_owed >= 1 and not trains:
            test_owed -= len(group)
            splits.test += group
        elif val_owed >= 1:
            val_owed -= len(group)
            splits.val += group
        else:
            splits.train += group


def _weigh(train: Sequence[Question], origins: Mapping[str, DataSource]) -> list[Question]:
    """The largest part of the training questions in which sources with weights stand in the ratio of these weights."""
    sizes = Counter(origins[question.id] for question in train if origins[question.id].weight)
    unit = min((size / (source.weight or 1) for source, size in sizes.items()), default=0)
    left = {source: max(1, round(unit * (source.weight or 1))) for source in sizes}
    kept = []
    for question in train:
        source = origins[question.id]
        if left.get(source, 1):
            kept.append(question)
            if source in left:
                left[source] -= 1
    return kept


def _spread(questions: Sequence[Question], rng: random.Random) -> list[Question]:
    """A shuffle in which any prefix holds its part of each database, difficulty and form."""
    cells: dict[tuple[str, ...], list[Question]] = defaultdict(list)
    for question in rng.sample(questions, len(questions)):
        cells[question.db_id, question.difficulty, question.form].append(question)
    total = Counter(part for cell, members in cells.items() for part in enumerate(cell) for _ in members)
    ordered: list[Question] = []
    taken: Counter[tuple[int, str]] = Counter()
    while cells:
        cell = min(cells, key=lambda cell: sum((taken[part] + 0.5) / total[part] for part in enumerate(cell)))
        ordered.append(cells[cell].pop())
        taken.update(enumerate(cell))
        if not cells[cell]:
            del cells[cell]
    return ordered
