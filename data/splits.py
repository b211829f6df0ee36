"""Who learns from which question: splits by database and within databases, without leaks.

Some databases are held out as a whole ("unseen_database" tests); the questions of the others are dealt to train, val
and test. Questions that share a text or a gold (paraphrases) are one group and stay together, over databases too: a
group that touches a held-out database is test only. Every split is ordered so that any prefix of it is balanced.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, zip_longest

from data.sql_form import DIFFICULTIES, gold_key, question_key
from shared.config.schema import DataConfig
from shared.errors import UserError
from shared.records import Question

SEEN, UNSEEN = "seen_database", "unseen_database"


class LeakageError(Exception):
    """Two splits share something they must not; the message names the question ids."""


@dataclass
class Splits:
    train: list[Question] = field(default_factory=list)
    val: list[Question] = field(default_factory=list)
    test: list[Question] = field(default_factory=list)

    def items(self) -> Iterable[tuple[str, list[Question]]]:
        return (("train", self.train), ("val", self.val), ("test", self.test))


def make_splits(questions: Sequence[Question], data: DataConfig, seed: int, sizes: Mapping[str, int]) -> Splits:
    """Deal the questions; `sizes` holds one number per database (its bytes), to hold out small and large ones alike.

    Raises UserError when the settings leave a split empty.
    """
    rng = random.Random(f"splits.{seed}")
    unseen = choose_unseen(sizes, data.unseen_databases, rng)
    splits = Splits()
    dealt: dict[str, list[list[Question]]] = defaultdict(list)
    for group in paraphrase_groups(questions):
        if any(question.db_id in unseen for question in group):
            splits.test += group
        else:
            dealt[group[0].db_id].append(group)
    for db_id in sorted(dealt):
        _deal(dealt[db_id], data, rng, splits)
    _refuse_empty(splits, data)
    splits.train, splits.val = _spread(splits.train, rng), _spread(splits.val, rng)
    splits.test = _test_order(splits.test, unseen, rng)
    return splits


def choose_unseen(sizes: Mapping[str, int], count: int, rng: random.Random) -> set[str]:
    """Names of the held-out databases, one from each of `count` equal ranges of size; fewer where that would leave none."""
    count = held_out_count(count, len(sizes))
    ordered = sorted(sizes, key=lambda name: (sizes[name], name))
    bounds = [len(ordered) * i // count for i in range(count + 1)] if count else []
    return {rng.choice(ordered[low:high]) for low, high in pairwise(bounds)}


def held_out_count(wanted: int, databases: int) -> int:
    """How many of so many databases are held out: as many as wanted, or half where that would leave none to train on."""
    return wanted if wanted < databases else databases // 2


def paraphrase_groups(questions: Sequence[Question]) -> list[list[Question]]:
    """Connected components of "same question text or same gold", in order of their first question."""
    root = list(range(len(questions)))

    def find(index: int) -> int:
        while root[index] != index:
            root[index] = root[root[index]]
            index = root[index]
        return index

    first: dict[tuple[str, str], int] = {}
    for index, question in enumerate(questions):
        for key in _keys(question):
            older, newer = sorted((find(first.setdefault(key, index)), find(index)))
            root[newer] = older
    groups: dict[int, list[Question]] = defaultdict(list)
    for index, question in enumerate(questions):
        groups[find(index)].append(question)
    return list(groups.values())


def leakage_check(train: Sequence[Question], val: Sequence[Question], test: Sequence[Question]) -> None:
    """Raises LeakageError, naming the ids, when splits share a question text or gold, or training saw an unseen database."""
    owner: dict[tuple[str, str], tuple[str, str]] = {}
    problems = []
    for split, questions in Splits([*train], [*val], [*test]).items():
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
    """Deal one database's groups. Going through them by difficulty, each split gets a group when it is owed one."""
    rng.shuffle(groups)
    groups.sort(key=lambda group: (*DIFFICULTIES, "unknown").index(group[0].difficulty))
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


def _refuse_empty(splits: Splits, data: DataConfig) -> None:
    wanted = {"train": True, "val": data.val_share > 0, "test": data.test_share > 0 or data.unseen_databases > 0}
    for name, questions in splits.items():
        if wanted[name] and not questions:
            raise UserError(f"The {name} split is empty; add questions, or change data.unseen_databases, "
                            "data.test_share or data.val_share.")  # fmt: skip


def _test_order(questions: Sequence[Question], unseen: set[str], rng: random.Random) -> list[Question]:
    """Seen and unseen databases in turn, as long as both last."""
    labelled = [replace(q, split_kind=UNSEEN if q.db_id in unseen else SEEN) for q in questions]
    kinds = [_spread([q for q in labelled if q.split_kind == kind], rng) for kind in (UNSEEN, SEEN)]
    return [question for pair in zip_longest(*kinds) for question in pair if question]


def _spread(questions: Sequence[Question], rng: random.Random) -> list[Question]:
    """A shuffle in which every database and difficulty comes at regular distances."""
    groups: dict[tuple[str, str], list[Question]] = defaultdict(list)
    for question in questions:
        groups[question.db_id, question.difficulty].append(question)
    placed = []
    for name in sorted(groups):
        members = groups[name]
        rng.shuffle(members)
        placed += [((i + rng.random()) / len(members), question.id, question) for i, question in enumerate(members)]
    return [question for _, _, question in sorted(placed, key=lambda item: item[:2])]
