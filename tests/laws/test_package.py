"""The package as one installs it: built, in an environment that does not see the repository."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, without this process's own paths."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=env | {"SOURCE_DATE_EPOCH": "1700000000"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _built(source: Path, kind: str, into: Path) -> Path:
    _run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into, cwd=source)
    (built,) = into.iterdir()
    return built


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; torch and the rest come from this one, without what is installed as editable."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "torch.pth").write_text("".join(f"{path}\n" for path in here))  # whose own .pth files are not read
    return home / "bin" / "python"


@pytest.mark.slow
def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source = _built(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    assert _contents(_built(folder, "wheel", tmp_path / "wheel")) == _contents(wheel)
    assert {"tests", "examples", "docs", "Makefile", "README.md"} <= {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = _contents(wheel)
    assert {name.partition("/")[0] for name in names} == {"shardfn", f"shardfn-{_version()}.dist-info"}
    assert "shardfn/py.typed" in names
    metadata = names[f"shardfn-{_version()}.dist-info/METADATA"].decode()
    assert "Requires-Dist: torch>=2.11" in metadata and "# shardfn" in metadata  # the README is its description


def _version() -> str:
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "shardfn/__init__.py").read_text(), re.MULTILINE)
    return version


@pytest.mark.slow
def test_the_readme_runs_with_the_wheel(python: Path, tmp_path: Path) -> None:
    where = _run(python, "-c", "import shardfn; print(shardfn.__file__, shardfn.__version__)", cwd=tmp_path)
    assert where == f"{python.parents[1]}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/" + (
        f"shardfn/__init__.py {_version()}\n"
    )
    (program,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    alone = _run(python, "train.py", cwd=tmp_path)
    ranks = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    together = _run(python, "-m", "shardfn.run", *ranks, "train.py", cwd=tmp_path)
    assert alone == together != ""


@pytest.mark.slow
def test_what_there_is_is_listed(python: Path, tmp_path: Path) -> None:
    shown = _run(python, "-m", "shardfn", "--help", cwd=tmp_path)
    assert f"shardfn {_version()}" in shown
    for name in ("python -m shardfn.run", "python -m shardfn.checkpoint", "value_and_grad", "Trainer", "make_mesh"):
        assert re.search(rf"^  {re.escape(name)} +\S.*\S$", shown, re.MULTILINE), shown
