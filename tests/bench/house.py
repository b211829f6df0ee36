"""Measure the size and the layering of the product: `python -m tests.bench.house`.

Prints lines and functions per package, modules per folder, import circles, and imports that point to a higher floor.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("run_pipeline.py", "data", "shared", "stage1_sft", "stage2_grpo")
# Each package may import only packages on its own floor or on a lower one, listed from the bottom up.
FLOORS = (
    ("shared", "shared.errors", "shared.tool_calls"),
    ("shared.config", "shared.records"),
    ("shared.models", "shared.processes", "shared.runs", "shared.sql"),
    ("shared.agent", "shared.cli", "shared.reward"),
    ("shared.evaluation",),
    ("shared.packaging", "shared.report", "shared.serving"),
    ("data", "stage1_sft", "stage2_grpo"),
    ("run_pipeline",),
)
LEVEL = {package: level for level, floor in enumerate(FLOORS) for package in floor}
MOST_MODULES = 16


@dataclass(frozen=True)
class Module:
    """One product file: its dotted name, size, number of functions, and the product modules that it imports."""

    name: str
    lines: int
    functions: int
    imports: frozenset[str]


def read_modules() -> dict[str, Module]:
    """Every Python file of the product, by dotted name."""
    files = [path for top in PRODUCT for path in ([ROOT / top] if top.endswith(".py") else (ROOT / top).rglob("*.py"))]
    names = {_name(file): file for file in sorted(files)}
    return {name: _read(name, file, set(names)) for name, file in names.items()}


def _name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(name: str, file: Path, known: set[str]) -> Module:
    text = file.read_text(encoding="utf-8")
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    imports, functions = set(), 0
    for node in ast.walk(ast.parse(text)):
        functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            imports |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
    product = frozenset(found for found in imports - {name} if found.split(".")[0] in {"tests", *LEVEL})
    return Module(name, text.count("\n"), functions, product)


def package_of(module: str) -> str:
    """The floor entry that a module belongs to, such as `shared.sql` or `stage2_grpo`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "shared" else parts[0]


def circles(modules: dict[str, Module]) -> list[list[str]]:
    """Groups of modules that import each other in a circle (strongly connected components, Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(modules[name].imports & modules.keys()):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(sorted(component))

    for name in modules:
        if name not in index:
            visit(name)
    return found


def upward_imports(modules: dict[str, Module]) -> list[str]:
    """Imports that point to a higher floor, into another stage, or into the tests."""
    wrong = []
    for module in modules.values():
        for target in sorted(module.imports):
            here, there = package_of(module.name), package_of(target)
            between_stages = here != there and here in FLOORS[-2] and there in FLOORS[-2]
            if there == "tests" or between_stages or LEVEL[there] > LEVEL[here]:
                wrong.append(f"{module.name} -> {target}")
    return wrong


def modules_per_folder(modules: dict[str, Module]) -> dict[str, int]:
    """Number of modules that lie directly in each product folder, `__init__.py` aside."""
    folders = Counter(name.rpartition(".")[0] for name in modules)
    for name in modules:
        if any(other.startswith(f"{name}.") for other in modules):
            folders[name.rpartition(".")[0]] -= 1
    return {folder: count for folder, count in sorted(folders.items()) if folder and count}


def main() -> None:
    """Print the measurements."""
    modules = read_modules()
    lines, functions = Counter[str](), Counter[str]()
    for module in modules.values():
        lines[package_of(module.name)] += module.lines
        functions[package_of(module.name)] += module.functions
    folders = modules_per_folder(modules)
    print(f"{'package':<20}{'lines':>7}{'functions':>11}{'per 1,000':>11}")
    for package in sorted(lines):
        print(f"{package:<20}{lines[package]:>7}{functions[package]:>11}{_density(package, functions, lines):>11.0f}")
    total, defs = sum(lines.values()), sum(functions.values())
    print(f"{'all':<20}{total:>7}{defs:>11}{1000 * defs / total:>11.1f}\n")
    print("modules per folder: " + ", ".join(f"{folder} {count}" for folder, count in folders.items()))
    print(f"circles: {circles(modules) or 'none'}")
    print("\n  ".join(["upward imports:", *(upward_imports(modules) or ["none"])]))


def _density(package: str, functions: Counter[str], lines: Counter[str]) -> float:
    return 1000 * functions[package] / max(lines[package], 1)


if __name__ == "__main__":
    main()
