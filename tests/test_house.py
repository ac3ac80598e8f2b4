"""The house as the design draws it: imports go downward only, and each library has its home."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import chimera_mpi

ROOT = Path(chimera_mpi.__file__).parent
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))

# From the ground up; a part may import from lower floors, and from its own part, but not from its neighbours.
FLOORS = [
    {"errors", "host"},
    {"lock"},
    {"schedule", "stopping"},
    {"timeline", "draw"},
    {"predict", "models", "data", "config", "checkpoint"},
    {"runlog", "runtime", "tasks", "trained"},
    {"saving", "sampled", "work"},
    {"fits"},
    {"train", "report", "watch"},
    {"prediction"},
    {"survival"},
    {"commands", "trainer"},
    {"cli"},
    {"__main__", "__init__"},
]
FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
NEIGHBOURS_ALLOWED = {("draw", "timeline")}

HOMES = {
    "h5py": {"data", "runlog"},
    "mpi4py": {"runtime", "saving", "commands"},
    "torch": {"models", "runtime", "checkpoint", "train", "trained", "trainer", "commands"},
    "pydantic": {"config"},
}


def part_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imports(path: Path):
    """Absolute names of all modules that a file imports, at its top or inside."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ["chimera_mpi", *path.parts[:-1]]
            base = here[: len(here) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            yield from ([f"{whole}.{alias.name}" for alias in node.names] if whole == "chimera_mpi" else [whole])


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path):
    mine = part_of(path)
    for name in imports(path):
        if name.startswith("chimera_mpi."):
            theirs = name.split(".")[1]
            down = FLOOR[theirs] < FLOOR[mine] or theirs == mine or (mine, theirs) in NEIGHBOURS_ALLOWED
            assert down, f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_libraries_have_homes(path):
    for name in imports(path):
        library = name.split(".")[0]
        if library in HOMES:
            assert part_of(path) in HOMES[library], f"{path} imports {name}"


LEAN = {"errors", "host", "schedule", "timeline", "draw", "predict"}


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in LEAN], ids=str)
def test_schedules_need_no_library(path):
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "mpi4py", "h5py", "pydantic", "rich"}


def test_every_folder_is_a_package_and_so_gets_installed():
    assert all((ROOT / path).parent.joinpath("__init__.py").is_file() for path in FILES)


def test_the_world_is_the_command_lines():
    for path in FILES:
        text = (ROOT / path).read_text()
        if part_of(path) not in {"cli", "commands", "__main__"}:
            assert "COMM_WORLD" not in text and "os.environ" not in text, path
