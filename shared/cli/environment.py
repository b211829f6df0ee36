"""The pipeline's own Python environment: made on the first start, checked in a moment on every later one.

`.venv` gets Python 3.12 and exactly the packages of requirements/<device>.txt, each checked against its hash and none
built from source, except antlr4-python3-runtime, which exists as (pure Python) source only. `.tools` holds uv unless a
usable one is on PATH. A stamp in `.venv`, written last, says what it was made from; without it, or for another device,
the environment is made anew. Linux only.

Runs under any Python from 3.11 and before anything is installed: only the standard library, directly and through
`shared.errors` and `shared.runs.manifest`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.errors import UserError
from shared.runs.manifest import alone

UV_VERSION = "0.13.9"
_OLDEST_UV = (0, 5)
_PYTHON = "3.12"
_STAMP = "firstcall.json"
_ENTERED = "FIRSTCALL_ENTERED"  # the root whose environment this process was started in; ends a loop of restarts
_ROOM_GIB = {"cpu": 9, "gpu": 16}  # of disk, package cache included
_SMOKE_TEST = "import bz2, ctypes, sqlite3, ssl, sys, venv; print('%d.%d' % sys.version_info[:2])"
_HEADER_TEST = "; import os, sysconfig; os.stat(sysconfig.get_path('include', 'posix_prefix') + '/Python.h')"


def enter(root: Path, profile: str, *, dry_run: bool = False) -> None:
    """Return inside the environment: make it if need be, then start the running script again with its Python.

    With `dry_run` nothing is made: the environment that is there must do, also one of another device.
    """
    python = ensure(root, profile, dry_run=dry_run)
    entered = os.environ.pop(_ENTERED, "") == str(root)
    if is_inside(root):
        return
    if entered:
        raise UserError(f"{root / '.venv'} is damaged; delete it and run the same command again.")
    os.environ[_ENTERED] = str(root)
    sys.stdout.flush()
    os.execv(python, [str(python), *sys.argv])


def ensure(root: Path, profile: str, *, dry_run: bool = False) -> Path:
    """The Python of the environment under `root`, made or brought up to date first where necessary.

    With `dry_run` any complete environment is used as it is. Raises UserError when that is missing, when `.venv`
    belongs to another copy of the repository, when there is no Python 3.12 to be had, no room, or an installation step
    fails.
    """
    venv, wanted, there = root / ".venv", wanted_stamp(root, profile), read_stamp(root / ".venv")
    if there.get("root", str(root)) != str(root):
        raise UserError(
            f"{venv} belongs to another copy of the repository ({there['root']}), whose code it would run; remove it "
            "here and run the same command again, which makes one for this copy."
        )
    if dry_run and not there:
        raise UserError(
            f"{venv} is not made yet, and a dry run makes nothing; run `python run_pipeline.py setup` first."
        )
    if not dry_run and there != wanted:
        with alone(root / ".tools" / "setup.lock"):
            found = read_stamp(venv)  # another process may have made it while this one waited
            if found.get("requirements") != wanted["requirements"]:
                _make(root, venv, profile)
                found = {}
            if found != wanted:
                _install_project(root, venv)
                write_stamp(venv, wanted)
                print(f"environment ready: {venv}", flush=True)
    return venv / "bin" / "python"


def entered(root: Path) -> bool:
    """Whether `enter` has started this process, which has not returned from it yet."""
    return os.environ.get(_ENTERED) == str(root)


def is_inside(root: Path) -> bool:
    """Whether this process already runs in the environment."""
    return Path(sys.prefix).resolve() == (root / ".venv").resolve()


def wanted_stamp(root: Path, profile: str) -> dict[str, str]:
    """What the environment must have been made from: device, place, hashes of the pinned packages and our metadata."""
    requirements = requirement_file(root, profile)
    return {
        "profile": profile,
        "root": str(root),
        "requirements": hashlib.sha256(requirements.read_bytes()).hexdigest(),
        "project": hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest(),
    }


def requirement_file(root: Path, profile: str) -> Path:
    """The pinned packages of a device."""
    return root / "requirements" / f"{profile}.txt"


def read_stamp(venv: Path) -> dict[str, str]:
    """What a complete environment was made from; empty for none or a half-made one."""
    try:
        stamp = json.loads((venv / _STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    complete = (venv / "bin" / "python").exists() and (venv / "pyvenv.cfg").exists()
    return stamp if isinstance(stamp, dict) and complete else {}


def write_stamp(venv: Path, stamp: dict[str, str]) -> None:
    """Mark the environment complete, atomically."""
    partial = venv / f"{_STAMP}.partial"
    partial.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    partial.replace(venv / _STAMP)


def find_python(candidates: Sequence[Path], *, headers: bool = False) -> Path | None:
    """The first candidate that is a working, complete Python 3.12 (a pyenv shim often exists without working).

    With `headers` it must have Python.h, against which Triton compiles on a GPU.
    """
    test = _SMOKE_TEST + (_HEADER_TEST if headers else "")
    for candidate in candidates:
        try:
            probe = subprocess.run([candidate, "-c", test], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if probe.returncode == 0 and probe.stdout.strip() == _PYTHON:
            return candidate
    return None


def python_candidates() -> list[Path]:
    """Where a Python 3.12 may be: this one, PATH, pyenv's versions (newest first)."""
    on_path = shutil.which(f"python{_PYTHON}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    versions = sorted(pyenv.glob(f"versions/{_PYTHON}*/bin/python"), key=_version_key, reverse=True)
    base = Path(getattr(sys, "_base_executable", sys.executable))  # inside an environment: the Python it was made from
    return [base, *([Path(on_path)] if on_path else []), *versions]


def _version_key(python: Path) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", python.parts[-3])]


def _make(root: Path, venv: Path, profile: str) -> None:
    print(f"setting up {venv} for {profile} (once, a few minutes)", flush=True)
    _check_room(root, profile)
    uv = _find_uv(root)
    python = find_python(python_candidates(), headers=profile == "gpu")
    if python is None:
        print(f"no suitable Python {_PYTHON} found here; asking uv to fetch one", flush=True)
    request = ["--python", str(python)] if python else ["--python", _PYTHON, "--managed-python"]
    _run([uv, "venv", "--quiet", "--clear", *request, venv], fix=(
        f"Python {_PYTHON} is missing and could not be fetched; install it (for example `pyenv install {_PYTHON}`) and "
        "run the same command again." if python is None
        else f"{python} could not make {venv}; see above."))  # fmt: skip
    requirements = requirement_file(root, profile)
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # progress bars for people, no list of packages for logs
    print(f"installing {requirements.relative_to(root)}", flush=True)
    _run([uv, "pip", "install", "--python", venv / "bin" / "python",
          "--no-deps", "--require-hashes", "--compile-bytecode", *quiet,
          "--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime", "-r", requirements], fix=(
        "A pinned package could not be installed; check the network and the space on the disk, then run the same "
        "command again."))  # fmt: skip


def _install_project(root: Path, venv: Path) -> None:
    _run([_find_uv(root), "pip", "install", "--quiet", "--python", venv / "bin" / "python", "--no-deps",
          "--no-build-isolation", "--reinstall", "-e", root],
         fix="The project itself could not be installed; see above, then run the same command again.")  # fmt: skip


def _find_uv(root: Path) -> Path:
    """uv from PATH when new enough, else our own under .tools (installed on first use)."""
    own = root / ".tools" / "bin" / "uv"
    on_path = shutil.which("uv")
    if on_path and uv_version(Path(on_path)) >= _OLDEST_UV:
        return Path(on_path)
    if uv_version(own) < _OLDEST_UV:
        print(f"installing uv {UV_VERSION} into {root / '.tools'}", flush=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--upgrade"]
        _run([*pip, "--root-user-action=ignore", "--target", root / ".tools", f"uv=={UV_VERSION}"],
             fix="uv could not be installed with pip; check that `python -m pip` works and the network is there."
             )  # fmt: skip
    return own


def uv_version(uv: Path) -> tuple[int, ...]:
    """Version of a uv executable; () when it does not run."""
    try:
        text = subprocess.run([uv, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.match(r"uv (\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else ()


def _check_room(root: Path, profile: str) -> None:
    free = shutil.disk_usage(root).free / 2**30
    if free < _ROOM_GIB[profile]:
        raise UserError(
            f"The environment needs about {_ROOM_GIB[profile]} GiB on the disk of {root}, but {free:.1f} GiB are free; "
            "make room and run the same command again."
        )


def _run(argv: Sequence[str | Path], *, fix: str) -> None:
    if subprocess.run(argv).returncode != 0:
        raise UserError(fix)
