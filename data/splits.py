"""Split questions into train, val and test without leakage.

Some databases are held out as a whole ("unseen_database" tests); the questions of the others are dealt to train, val
and test. Questions that share a text or a gold (paraphrases) form one group and stay together, across databases too: a
group that touches a held-out database is test only. Every split is ordered so that any prefix of it is balanced.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, zip_longest

import networkx

from data.sql_form import DIFFICULTIES, gold_key, question_key
from shared.config.schema import DataConfig
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

    def items(self) -> tuple[tuple[str, list[Question]], ...]:
        """Name and questions of each split."""
        return ("train", self.train), ("val", self.val), ("test", self.test)


def make_splits(questions: Sequence[Question], data: DataConfig, seed: int, sizes: Mapping[str, int]) -> Splits:
    """Split the questions; `sizes` holds the bytes of each database, so that small and large ones are held out alike.

    Raises UserError when the settings leave a split empty.
    """
    rng = random.Random(f"splits.{seed}")
    splits = Splits(unseen=choose_unseen(sizes, Counter(q.db_id for q in questions), data.unseen_databases, rng))
    dealt: dict[str, list[list[Question]]] = defaultdict(list)
    for group in paraphrase_groups(questions):
        if any(question.db_id in splits.unseen for question in group):
            splits.test += group
        else:
            dealt[group[0].db_id].append(group)
    for db_id in sorted(dealt):
        _deal(dealt[db_id], data, rng, splits)
    needed = {"train": True, "val": data.val_share > 0, "test": data.test_share > 0 or data.unseen_databases > 0}
    for name, chosen in splits.items():
        if needed[name] and not chosen:
            raise UserError(
                f"The {name} split of {len(questions)} questions is empty; add questions (20 on one database are "
                "enough), or change data.unseen_databases, data.test_share or data.val_share."
            )
    splits.train, splits.val = _spread(splits.train, rng), _spread(splits.val, rng)
    labelled = [replace(q, split_kind=UNSEEN if q.db_id in splits.unseen else SEEN) for q in splits.test]
    kinds = [_spread([q for q in labelled if q.split_kind == kind], rng) for kind in (UNSEEN, SEEN)]
    splits.test = [question for pair in zip_longest(*kinds) for question in pair if question]
    return splits


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
        shared.add_edges_from((index, key) for key in _keys(question))
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
            for key in _keys(question):
                other, identity = owner.setdefault(key, (split, question.id))
                if other != split:
                    problems.append(f"{identity} ({other}) and {question.id} ({split}) share the same {key[0]}")
    trained = {question.db_id: question.id for question in chain(train, val)}
    for question in test:
        if question.split_kind == UNSEEN and question.db_id in trained:
            problems.append(f"{trained[question.db_id]} trains on {question.db_id}, unseen by {question.id} (test)")
    if problems:
        raise LeakageError(f"{len(problems)} leaks between splits: " + "; ".join(problems[:20]))


def _keys(question: Question) -> tuple[tuple[str, str], ...]:
    return ("question", question_key(question.question)), ("gold", gold_key(question.gold_sql))


def _deal(groups: list[list[Question]], data: DataConfig, rng: random.Random, splits: Splits) -> None:
    """Deal one database's groups by difficulty and form: each split gets a group when its share is due."""
    rng.shuffle(groups)
    groups.sort(key=lambda group: ((*DIFFICULTIES, "unknown").index(group[0].difficulty), group[0].form))
    test_owed, val_owed = rng.random(), rng.random()
    for group in groups:
        test_owed += data.test_share * len(group)
        val_owed += data.val_share * len(group)
        if test_owed >= 1:
            test_owed -= len(group)
            splits.test += group
        elif val_owed >= 1:
            val_owed -= len(group)
            splits.val += group
        else:
            splits.train += group


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
