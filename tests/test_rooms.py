"""The plan of the house: every room is packaged and says what it is for, has few files and floors, and no circle."""

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

import precision_time

ROOT = Path(precision_time.__file__).parent
FOLDERS = ("flows", "tasks", "predictor", "casgd", "storage")
#: casgd and storage are one room each.
FLAT = ("casgd", "storage")
MOST_FILES = {"casgd": 31}
MOST_FILES_ELSEWHERE = 25
MOST_FLOORS = 6


def list_rooms() -> list[str]:
    """Every folder of the package that holds code, as a path from the root."""
    found = [path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted({str(folder.relative_to(ROOT)) for folder in found})


def list_modules() -> dict[str, Path]:
    """Every module by its dotted name below the package."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


@cache
def read_imports() -> dict[str, set[str]]:
    """The modules of ours that each module imports, also inside functions."""
    modules = list_modules()
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        imports[name] = {full.removeprefix("precision_time.") for full in imported} & modules.keys() - {name}
    return imports


def find_circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a ring; empty where none do."""
    done: set[str] = set()

    def follow(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return trail[trail.index(name) :]
        if name not in done:
            for imported in sorted(imports[name]):
                if circle := follow(imported, [*trail, name]):
                    return circle
            done.add(name)
        return []

    return next((circle for name in sorted(imports) if (circle := follow(name, []))), [])


def count_floors(room: str) -> int:
    """The longest chain of imports between files of one room."""
    prefix = room.replace("/", ".")
    inside = {name for name in read_imports() if name.rpartition(".")[0] == prefix}

    @cache
    def floor_of(name: str) -> int:
        return 1 + max((floor_of(imported) for imported in read_imports()[name] & inside), default=0)

    return max(map(floor_of, inside), default=0)


def test_every_room_is_packaged_and_nothing_else_is() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {f"precision_time.{room.replace('/', '.')}" for room in list_rooms()} | {"precision_time"}
    assert set(settings["tool"]["setuptools"]["packages"]) == packages


@pytest.mark.parametrize("room", list_rooms())
def test_a_room_says_in_one_line_what_belongs_there(room: str) -> None:
    (statement,) = ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Constant)
    assert "\n" not in str(statement.value.value)


@pytest.mark.parametrize("room", list_rooms())
def test_a_room_has_few_files(room: str) -> None:
    files = [path for path in (ROOT / room).glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MOST_FILES.get(room, MOST_FILES_ELSEWHERE)


@pytest.mark.parametrize("room", [room for room in list_rooms() if room not in FLAT])
def test_a_room_has_few_floors(room: str) -> None:
    assert count_floors(room) <= MOST_FLOORS


def test_no_files_import_each_other_in_a_circle() -> None:
    assert find_circle(read_imports()) == []


def test_a_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
