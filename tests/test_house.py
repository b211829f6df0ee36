"""The layering of the product: no import circle, no import of a higher floor, folders small enough to read."""

from tests.bench.house import MOST_MODULES, Module, circles, modules_per_folder, read_modules, upward_imports


def test_no_module_imports_itself_through_others() -> None:
    assert circles(read_modules()) == []


def test_imports_point_down() -> None:
    assert upward_imports(read_modules()) == []


def test_no_folder_holds_more_modules_than_a_reader_takes_in() -> None:
    assert {folder: count for folder, count in modules_per_folder(read_modules()).items() if count > MOST_MODULES} == {}


def test_a_planted_circle_and_a_planted_upward_import_are_found() -> None:
    modules = {
        "shared.sql.a": Module("shared.sql.a", 1, 0, frozenset({"shared.sql.b"})),
        "shared.sql.b": Module("shared.sql.b", 1, 0, frozenset({"shared.sql.a", "shared.agent", "tests.x"})),
        "data.c": Module("data.c", 1, 0, frozenset({"stage1_sft.train"})),
    }
    assert circles(modules) == [["shared.sql.a", "shared.sql.b"]]
    assert upward_imports(modules) == [
        "shared.sql.b -> shared.agent",
        "shared.sql.b -> tests.x",
        "data.c -> stage1_sft.train",
    ]
