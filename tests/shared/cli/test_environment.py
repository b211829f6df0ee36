"""Setting up the environment, as far as it goes without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.cli import environment
from shared.errors import UserError

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder whose environment is complete for the CPU."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.txt").write_text("tqdm==4.66\n")
    (tmp_path / "requirements" / "gpu.txt").write_text("tqdm==4.67\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".venv" / "pyvenv.cfg").touch()
    environment.write_stamp(tmp_path / ".venv", environment.wanted_stamp(tmp_path, "cpu"))
    return tmp_path


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_uv(folder: Path, monkeypatch: pytest.MonkeyPatch, then: str = "") -> Path:
    """A `uv` first on PATH that writes down how it is called; returns that file."""
    calls = folder / "calls"
    executable(
        folder / "bin" / "uv", f'[ "$1" = --version ] && echo "uv 0.9.1 (abc)" && exit\necho "$@" >> {calls}\n{then}'
    )
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    return calls


def snapshot(folder: Path) -> dict[Path, int]:
    """Every path below `folder` with the time of its last change."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_a_complete_environment_is_used_at_once(project: Path) -> None:
    assert environment.ensure(project, "cpu") == project / ".venv" / "bin" / "python"


def test_a_stamp_belongs_to_one_device_one_place_and_one_set_of_files(project: Path) -> None:
    stamp = environment.read_stamp(project / ".venv")
    assert stamp["profile"] == "cpu"
    assert stamp != environment.wanted_stamp(project, "gpu")
    (project / "requirements" / "cpu.txt").write_text("tqdm==4.67\n")
    assert stamp != environment.wanted_stamp(project, "cpu")


def test_an_environment_without_its_python_counts_as_half_made(project: Path) -> None:
    (project / ".venv" / "bin" / "python").unlink()
    (project / ".venv" / "bin" / "python").symlink_to(project / "gone")
    assert environment.read_stamp(project / ".venv") == {}


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_stamp_counts_as_half_made(project: Path, text: str) -> None:
    (project / ".venv" / "firstcall.json").write_text(text)
    assert environment.read_stamp(project / ".venv") == {}


def test_changed_packages_remake_the_environment_with_hashes_and_without_builds(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "_ROOM_GIB", {"cpu": 0, "gpu": 0})
    calls = fake_uv(project / "fake", monkeypatch)
    (project / "requirements" / "cpu.txt").write_text("tqdm==4.67\n")
    environment.ensure(project, "cpu")
    make, packages, ours = calls.read_text().splitlines()
    assert make.startswith("venv")
    assert "--clear" in make
    for promise in ("--require-hashes", "--only-binary :all:", "--no-deps"):
        assert promise in packages
    assert ours.endswith(f"-e {project}")
    assert environment.read_stamp(project / ".venv") == environment.wanted_stamp(project, "cpu")
    assert "setting up" in capsys.readouterr().out


def test_a_plan_for_another_device_or_other_metadata_changes_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_uv(project / "fake", monkeypatch)
    (project / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    before = snapshot(project)
    environment.ensure(project, "gpu", dry_run=True)
    assert not calls.exists()
    assert snapshot(project) == before


def test_a_dry_run_without_an_environment_makes_none(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_uv(project / "fake", monkeypatch)
    (project / ".venv" / "firstcall.json").unlink()
    before = snapshot(project)
    with pytest.raises(UserError, match=r"\.venv is not made yet, and a dry run makes nothing; run .* setup"):
        environment.ensure(project, "cpu", dry_run=True)
    assert not calls.exists()
    assert snapshot(project) == before


@pytest.mark.parametrize("dry_run", [True, False])
def test_an_environment_of_another_copy_is_refused(project: Path, tmp_path: Path, dry_run: bool) -> None:
    stamp = environment.read_stamp(project / ".venv") | {"root": "/elsewhere/clone"}
    environment.write_stamp(project / ".venv", stamp)
    with pytest.raises(
        UserError, match=r"belongs to another copy of the repository \(/elsewhere/clone\).*remove it here"
    ):
        environment.ensure(project, "cpu", dry_run=dry_run)
    assert environment.read_stamp(project / ".venv") == stamp


def test_changed_project_metadata_only_reinstalls_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_uv(project / "fake", monkeypatch)
    (project / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    environment.ensure(project, "cpu")
    (ours,) = calls.read_text().splitlines()
    assert ours.endswith(f"-e {project}")


def test_a_failed_installation_leaves_no_stamp_and_says_what_to_do(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_ROOM_GIB", {"cpu": 0, "gpu": 0})
    fake_uv(project / "fake", monkeypatch, f'[ "$1" = venv ] && rm {project}/.venv/firstcall.json && exit\nexit 3')
    with pytest.raises(UserError, match="pinned package could not be installed"):
        environment.ensure(project, "gpu")
    assert environment.read_stamp(project / ".venv") == {}


def test_too_little_room_is_said_before_anything_is_touched(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_ROOM_GIB", {"cpu": 10**6, "gpu": 10**6})
    with pytest.raises(UserError, match=r"needs about 1000000 GiB on the disk of .*, but [\d.]+ GiB are free"):
        environment.ensure(project, "gpu")
    assert environment.read_stamp(project / ".venv")["profile"] == "cpu"


def test_a_python_that_only_seems_to_be_there_is_passed_over(tmp_path: Path) -> None:
    shim = executable(tmp_path / "python3.12", "echo 'command not found' >&2; exit 127")
    other = executable(tmp_path / "python3.11", "echo 3.11")
    good = executable(tmp_path / "good", "echo 3.12")
    assert environment.find_python([tmp_path / "missing", shim, other, good]) == good
    assert environment.find_python([shim, other]) is None


def test_for_a_gpu_only_a_python_with_its_headers_will_do(tmp_path: Path) -> None:
    bare = executable(tmp_path / "bare", 'case "$2" in *Python.h*) exit 1;; esac; echo 3.12')
    whole = executable(tmp_path / "whole", "echo 3.12")
    assert environment.find_python([bare, whole]) == bare
    assert environment.find_python([bare, whole], headers=True) == whole


def test_pyenv_versions_are_candidates_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("3.12.1", "3.12.10", "3.11.7"):
        executable(tmp_path / "versions" / version / "bin" / "python", "")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found = [path.parts[-3] for path in environment.python_candidates() if tmp_path in path.parents]
    assert found == ["3.12.10", "3.12.1"]


def test_without_any_python_the_message_names_the_way_out(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_ROOM_GIB", {"cpu": 0, "gpu": 0})
    monkeypatch.setattr(environment, "python_candidates", list)
    calls = fake_uv(project / "fake", monkeypatch, "exit 1")
    with pytest.raises(UserError, match=r"Python 3.12 is missing and could not be fetched; install it"):
        environment.ensure(project, "gpu")
    assert "--managed-python" in calls.read_text()


def test_uv_versions_are_read(tmp_path: Path) -> None:
    assert environment.uv_version(executable(tmp_path / "uv", "echo 'uv 0.13.9 (x86_64)'")) == (0, 13, 9)
    assert environment.uv_version(tmp_path / "none") == ()
    assert environment.uv_version(executable(tmp_path / "odd", "echo hello")) == ()


def test_the_runner_starts_with_the_standard_library_alone() -> None:
    code = "import sys, json, run_pipeline; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(REPO)!r}); {code}"]
    modules = set(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert modules - set(sys.stdlib_module_names) - {"__main__", "__mp_main__"} == {"shared", "run_pipeline"}


def test_every_pinned_package_has_hashes_and_no_address() -> None:
    for profile in ("cpu", "gpu"):
        text = environment.requirement_file(REPO, profile).read_text()
        packages = [line for line in text.splitlines() if "==" in line]
        assert len(packages) > 100
        assert all(line.endswith("\\") for line in packages), "a package without hashes"
        assert "://" not in text
