"""What is understood of a database: meanings, names, references, and what is left out."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from data.synthesis import words
from data.synthesis.hints import read_hints, report
from data.synthesis.schema import Meaning, Understanding, understand
from shared.errors import UserError
from shared.sql.database import Database
from tests.data.conftest import settings


def meanings(about: Understanding, table: str) -> dict[str, str]:
    return {column.name: column.meaning.value for column in about.table(table).columns}


def test_columns_mean_what_their_names_and_values_say(about: Understanding) -> None:
    assert meanings(about, "tbl_customer") == {
        "cust_id": "key", "full_name": "name", "gender": "category", "country": "category", "is_active": "flag",
        "birth year": "date",
    }  # fmt: skip
    assert meanings(about, "order") == {
        "order id": "key", "cust_id": "reference", "order date": "date", "total_amt": "quantity", "group": "category",
        "scan": "ignored", "note": "text", "taxed": "level",
    }  # fmt: skip


def test_an_undeclared_reference_is_found_by_name_and_values(about: Understanding) -> None:
    column = next(c for c in about.table("order").columns if c.name == "cust_id")
    assert (column.references, column.role) == (("tbl_customer", "cust_id"), "customer")


def test_codes_are_said_as_people_say_them(about: Understanding) -> None:
    gender = next(c for c in about.table("tbl_customer").columns if c.name == "gender")
    assert gender.says == {"F": "female", "M": "male"}


def test_what_cannot_be_asked_about_is_left_out_with_its_reason(about: Understanding) -> None:
    assert about.left_out == {"empty_table": "it has no rows", "big_orders": "it is a view"}


def test_the_report_is_a_hints_file_that_changes_nothing(
    strange: Database, about: Understanding, tmp_path: Path
) -> None:
    file = tmp_path / "hints.yaml"
    file.write_text("\n".join(report(about)), encoding="utf-8")
    assert understand(strange, read_hints(file, strange)).tables == about.tables


def test_hints_overrule(strange: Database, tmp_path: Path) -> None:
    file = tmp_path / "hints.yaml"
    file.write_text(
        "tables:\n  order:\n    words: purchase\n"
        "    columns: {total_amt: {words: price, meaning: level}, group: {synonyms: [size]}}\n"
        "  big_orders: {leave_out: false}\n  tbl_customer: {leave_out: true}\n"
    )
    changed = understand(strange, read_hints(file, strange))
    assert [table.name for table in changed.tables] == ["order", "big_orders"]
    order = changed.table("order")
    assert (order.singular, order.plural) == ("purchase", "purchases")
    columns = {column.name: column for column in order.columns}
    assert (columns["total_amt"].words, columns["total_amt"].meaning) == (("price",), Meaning.LEVEL)
    assert columns["group"].words == ("group", "size")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tables: {orders: {}}", "no table 'orders'"),
        ("tables: {order: {columns: {price: {}}}}", "no column 'price'"),
        ("tables: {order: {word: x}}", "'word' is unknown"),
        ("tables: {order: {columns: {group: {meaning: thing}}}}", "cannot mean 'thing'"),
        ("- x", 'must be one mapping "tables"'),
        ("{", "cannot be read"),
    ],
)
def test_wrong_hints_are_refused_in_one_sentence(strange: Database, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "hints.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        read_hints(file, strange)


@pytest.mark.parametrize(
    ("name", "one", "many"),
    [
        ("tblCustomerOrders", "customer order", "customer orders"),
        ("Ref_Template_Types", "template type", "template types"),
        ("people", "person", "people"),
        ("TV_series", "TV series", "TV series"),
        ("payments_received", "payment received", "payments received"),
        ("class_of_service", "class of service", "classes of service"),
        ("sizes", "size", "sizes"),
        ("cars_data", "car", "cars"),
        ("city", "city", "cities"),
        ("addresses", "address", "addresses"),
    ],
)
def test_tables_are_called_in_words(name: str, one: str, many: str) -> None:
    assert words.table_words(name, []) == (one, many)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("settlement_date_str", "settlement date"),
        ("lastname", "last name"),
        ("bulgarian_commander", "Bulgarian commander"),
        ("OpenOnSunday", "open on Sunday"),
        ("str", "str"),
    ],
)
def test_columns_are_called_in_words(name: str, said: str) -> None:
    assert words.spoken(words.tokens(name)) == said


def test_names_in_any_script_are_understood(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as connection, connection:
        connection.execute('CREATE TABLE "商品" ("#" INTEGER, "名前" TEXT, "%" REAL)')
        connection.executemany('INSERT INTO "商品" VALUES (?, ?, ?)', [(i, f"n{i % 5}", i * 1.5) for i in range(20)])
    about = understand(Database(tmp_path / "shop.sqlite", settings().sandbox), {})
    assert [column.words for column in about.table("商品").columns] == [("#",), ("名前",), ("%",)]
