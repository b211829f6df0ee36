"""Which share of the golds of real data sets has a form that the question generator can make.

    python -m tests.bench.question_forms [--data FOLDER] [--questions 600] [--samples GOLDS.jsonl]
    python -m tests.bench.question_forms --read 80 --seed 7 --questions 100    prints questions at random to judge

A form is a gold without its literals, names and aliases; an inner join is a join, COUNT(column) is COUNT(*), and
neither the order of answer columns and conditions nor the direction of an order or comparison counts. The generator is
asked for questions on every database of the sets; --samples takes the golds of another generator instead, to compare.
For each database the number of questions, the seconds, and the golds that fail when they are run again are printed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from data.synthesis.generate import Taken, generate
from data.synthesis.schema import understand
from shared.cli.command_line import run_main
from shared.config.load import load_config
from shared.records import Question
from shared.sql.database import Database, SqlError
from tests.beside import REAL_DATA

ROOT = Path(__file__).resolve().parents[2]
SETS = (
    "spider_sample/dev.json",
    "classic/chinook/questions.json",
    "defog_sample/dev.json",
    "bird_sample/mini_dev_sqlite.json",
)
WANTED = 0.60


def main() -> None:
    """Measure and print; exit status 1 below the wanted share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=REAL_DATA, help="folder of the real sets")
    parser.add_argument("--questions", type=int, default=600, help="of each database (default: 600)")
    parser.add_argument("--samples", type=Path, help="JSONL with gold_sql of another generator")
    parser.add_argument("--read", type=int, default=0, help="print so many questions and golds, and stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="write the generated golds there, for --samples")
    args = parser.parse_args()
    if args.samples:
        golds = [json.loads(line)["gold_sql"] for line in args.samples.read_text(encoding="utf-8").splitlines()]
    else:
        questions = list(generated(args.data, args.questions, args.seed))
        for question in random.Random(args.seed).sample(questions, args.read):
            print(f"[{question.db_id}] {question.question}\n    {question.gold_sql}")
        if args.read:
            return
        golds = [question.gold_sql for question in questions]
        if args.keep:
            args.keep.write_text("".join(json.dumps({"gold_sql": sql}) + "\n" for sql in golds), encoding="utf-8")
    makes = {form(sql) for sql in golds}
    print(f"{len(golds)} generated golds have {len(makes)} forms")
    total, covered = 0, 0
    for file in [args.data / name for name in SETS]:
        rows = json.loads(file.read_text(encoding="utf-8"))
        forms = Counter(form(row.get("query") or row.get("SQL")) for row in rows)
        found = sum(count for each, count in forms.items() if each in makes)
        print(f"{file.parent.name:20} {found:4} of {len(rows):4} golds: {found / len(rows):.1%}")
        for missing, count in [(each, n) for each, n in forms.most_common() if each not in makes][:5]:
            print(f"    missing {count:3}  {missing}")
        total, covered = total + len(rows), covered + found
    print(f"{'all':20} {covered:4} of {total:4} golds: {covered / total:.1%} (wanted: {WANTED:.0%})")
    raise SystemExit(covered / total < WANTED)


def generated(folder: Path, count: int, seed: int) -> Iterator[Question]:
    """Questions on every database of the real sets."""
    limits = load_config(ROOT / "pipeline.yaml", "cpu", ()).sandbox
    for path in sorted(folder.glob("*/*/**/*.sqlite")):
        started = time.monotonic()
        database = Database(path, limits)
        questions = generate(database, understand(database, {}), count, seed, Taken())
        seconds = time.monotonic() - started
        failed = 0
        for question in questions:
            try:
                database.execute(question.gold_sql, limits.max_compare_rows)
            except SqlError:
                failed += 1
        print(f"{path.stem:25} {len(questions):4} questions  {seconds:5.1f} s  {failed} golds fail", flush=True)
        yield from questions


def form(sql: str) -> str:
    """The gold without literals, names and aliases; unreadable SQL is a form of its own."""
    try:
        tree = sqlglot.parse_one(sql, read="sqlite")
    except SqlglotError:
        return sql
    named = {alias.alias.lower(): alias.this for alias in tree.find_all(exp.Alias)}
    for column in [*tree.find_all(exp.Column)]:
        if not column.table and column.name.lower() in named and column.find_ancestor(exp.Order, exp.Having):
            column.replace(named[column.name.lower()].copy())
    tables = {node.alias_or_name.lower() for node in tree.find_all(exp.Table)}
    return tree.transform(_plain, tables).sql(dialect="sqlite")


def _plain(node: exp.Expression, tables: set[str]) -> exp.Expression:
    if isinstance(node, (exp.Alias, exp.Paren)):
        return node.this.transform(_plain, tables)
    if isinstance(node, exp.Table):
        return exp.to_identifier("t")
    if isinstance(node, exp.Column):
        quoted = isinstance(node.this, exp.Identifier) and node.this.quoted and not node.table
        return exp.to_identifier("v" if quoted else "c")
    if isinstance(node, (exp.Literal, exp.Neg, exp.Boolean)):
        return exp.to_identifier("v")
    if isinstance(node, exp.Count) and not isinstance(node.this, exp.Distinct):
        return exp.Count(this=exp.Star())
    if isinstance(node, exp.Join):
        node.set("kind", None)
    if isinstance(node, exp.Ordered):
        return node.this.transform(_plain, tables)
    if isinstance(node, (exp.GT, exp.GTE, exp.LTE, exp.LT)):
        return exp.GT(this=node.this.transform(_plain, tables), expression=node.expression.transform(_plain, tables))
    if isinstance(node, exp.And):
        parts = sorted((each.transform(_plain, tables) for each in node.flatten()), key=lambda each: str(each.sql()))
        return exp.and_(*parts)
    if isinstance(node, exp.Select):
        shown = [each.unalias().transform(_plain, tables) for each in node.expressions]
        node.set("expressions", sorted(shown, key=lambda each: str(each.sql())))
    return node


if __name__ == "__main__":
    run_main(main)
