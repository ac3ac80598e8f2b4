"""What is installed: all of the package in wheel and sdist, and what they say of themselves."""

from __future__ import annotations

import configparser
import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "chimera_mpi"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Wheel and sdist, the wheel from the sdist, of a copy of what belongs to the project; without network."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "chimera_mpi", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def files_of_the_package() -> set[str]:
    """All but what compiling leaves."""
    return {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def test_all_of_the_package_is_in_both(built):
    wheel, sdist = built
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("chimera_mpi/")}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert in_wheel == files_of_the_package()
    assert in_wheel | {"setup.cfg", "pyproject.toml", "README.md"} <= in_sdist
    assert {
        "chimera_mpi/py.typed",
        "chimera_mpi/presets/gpt-tiny.toml",
        "chimera_mpi/machines/piz-daint.toml",
    } <= in_wheel


def test_what_it_says_of_itself(built):
    wheel = zipfile.ZipFile(built[0])
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    told = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    assert (told["Name"], told["Version"]) == ("chimera-mpi", settings["metadata"]["version"])
    assert told["Requires-Python"] == "<3.14,>=3.10"
    assert set(told.get_all("Provides-Extra")) == {"mpich", "plot", "hf", "tensorboard", "test"}
    assert told.get_payload().startswith("# chimera_mpi")
    assert "chimera-mpi = chimera_mpi.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_pins_fit_what_is_asked_for():
    """On every Python: each requirement has one pin, within its bounds."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    lines = [
        *settings["options"]["install_requires"].split("\n"),
        *settings["options.extras_require"]["mpich"].split("\n"),
    ]
    for extra in ("plot", "hf", "tensorboard", "test"):
        lines += settings["options.extras_require"][extra].split("\n")
    wanted = [Requirement(line) for line in lines if line and not line.startswith("chimera-mpi")]
    pins = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
    for python in ("3.10", "3.11", "3.12", "3.13"):
        here = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        pinned: dict[str, str] = {}
        for pin in pins:
            if pin.marker is None or pin.marker.evaluate(here):
                assert canonicalize_name(pin.name) not in pinned, f"{pin.name} is pinned twice on {python}"
                (version,) = pin.specifier
                pinned[canonicalize_name(pin.name)] = version.version
        for asked in wanted:
            if asked.marker is None or asked.marker.evaluate(here):
                assert asked.specifier.contains(pinned[canonicalize_name(asked.name)]), (asked, python)
