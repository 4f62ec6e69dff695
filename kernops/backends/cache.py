"""The disk cache of compiled code.

An entry is a directory `<root>/<kind>/<digest>/` that holds what one build wrote and a manifest with checksums. It
appears by the rename of a finished directory, so a reader sees a whole entry or none, and two processes that build the
same key at once both succeed. What does not verify (truncated, written by another user, not ours at all) is rebuilt.

Compiled code is executed by whoever loads it, so ownership is part of the check: nothing is loaded that another user
could have written. A directory that cannot be used costs the compile time once per process, never the call.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernops import environment

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

FORMAT = 1  # raise it when the layout of an entry changes: older entries then count as misses
MANIFEST = "manifest.json"
_KIND = re.compile(r"[a-z0-9_]+")
_DIGEST = re.compile(r"[0-9a-f]{40}")
_LEFTOVER = re.compile(r"\.(new|old)-.*")  # of a process that died while publishing

# Results that could not be saved, by entry path: they live in temporary directories until this process ends.
_unsaved: dict[Path, Path] = {}
_warned: set[str] = set()


# ---- the one function of the back ends ---------------------------------------------------------------------------


def artifact(
    kind: str,
    key: Sequence[str],
    filename: str,
    build: Callable[[Path], None],
    *,
    description: str = "",
) -> Path:
    """Path of `filename` as `build` wrote it for `key`, now or in an earlier process.

    `build(tmpdir)` is called on a miss and must write `tmpdir / filename`; whatever else it leaves there (the source
    text, say) is kept beside it. If it raises, the error passes through and `tmpdir` stays, so that a message may
    name the files in it. `key` must hold everything that can change the result: source text, headers' digest,
    compiler version, flags, architecture. `description` is what `python -m kernops cache list` shows.
    """
    if not _KIND.fullmatch(kind):
        raise ValueError(f"kind={kind!r}: expected lower-case letters, digits and underscores")
    digest = _digest(kind, key)
    try:
        entry = root() / kind / digest
        _check_place(entry.parent)
        if _verify(entry, filename):
            return entry / filename
        problem = None
    except OSError as error:
        entry, problem = Path(kind) / digest, error
    kept = _unsaved.get(entry)
    if kept is not None and (kept / filename).is_file():
        return kept / filename

    made = _built(filename, build)
    if problem is None:
        try:
            _save(entry, made, filename, description or _first_line(key))
            shutil.rmtree(made, ignore_errors=True)
            return entry / filename
        except OSError as error:
            problem = error
    _warn_once(problem)
    _unsaved[entry] = made
    _remove_at_exit(made)
    return made / filename


def headers_digest(paths: Iterable[str | os.PathLike[str]]) -> str:
    """Digest of the names and contents of source files; a directory stands for all files under it."""
    digest = hashlib.sha256()
    for name, path in sorted(_named_files(paths)):
        _update(digest, name.encode())
        _update(digest, path.read_bytes())
    return digest.hexdigest()


# ---- what `python -m kernops cache` shows ------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    kind: str
    digest: str
    size: int  # bytes, all files
    age: float  # seconds since it was published
    description: str  # empty where the manifest cannot be read
    path: Path


def root() -> Path:
    """The cache directory, which need not exist."""
    given = environment.get("KERNOPS_CACHE_DIR")
    if given:
        return Path(os.path.expanduser(given)).absolute()
    home = os.path.expanduser("~")
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or os.path.join(home, "AppData", "Local")
    elif sys.platform == "darwin":
        base = os.path.join(home, "Library", "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # the XDG specification: relative paths are to be ignored
            base = os.path.join(home, ".cache")
    if not os.path.isabs(base):
        raise FileNotFoundError("this user has no home directory; KERNOPS_CACHE_DIR can name a cache directory")
    return Path(base) / "kernops"


def entries() -> list[Entry]:
    """All entries, the youngest first."""
    found = []
    for path in _entry_paths(_DIGEST):
        with contextlib.suppress(OSError):  # removed by another process meanwhile
            size = sum(f.stat().st_size for f in path.iterdir())
            age = max(0.0, time.time() - path.stat().st_mtime)
            found.append(Entry(path.parent.name, path.name, size, age, _description(path), path))
    return sorted(found, key=lambda e: e.age)


def clear() -> tuple[int, int]:
    """Remove all entries and nothing else; (entries, bytes) removed. Running processes keep what they have loaded."""
    gone = []
    for entry in entries():
        shutil.rmtree(entry.path, ignore_errors=True)
        if not entry.path.exists():
            gone.append(entry)
    for path in _entry_paths(_LEFTOVER):
        shutil.rmtree(path, ignore_errors=True)
    for kind in {entry.kind for entry in gone}:
        with contextlib.suppress(OSError):  # not empty
            (root() / kind).rmdir()
    return len(gone), sum(entry.size for entry in gone)


def _entry_paths(pattern: re.Pattern[str]) -> list[Path]:
    """Directories of that name in the directories of kinds: a cache directory set to $HOME by mistake loses nothing."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for kind in root().iterdir():
            if _KIND.fullmatch(kind.name) and kind.is_dir() and not kind.is_symlink():
                with contextlib.suppress(OSError):
                    found += [p for p in kind.iterdir() if pattern.fullmatch(p.name) and p.is_dir()]
    return found


def _description(entry: Path) -> str:
    manifest = _manifest(entry)
    text = manifest.get("description") if manifest else None
    return text if isinstance(text, str) else ""


# ---- keys and checks ---------------------------------------------------------------------------------------------


def _update(digest: hashlib._Hash, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little"))  # the length first: ("ab", "c") is not ("a", "bc")
    digest.update(data)


def _digest(kind: str, key: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (str(FORMAT), kind, *key):
        _update(digest, part.encode(errors="surrogateescape"))  # a compiler's path may hold any bytes
    return digest.hexdigest()[:40]


def _first_line(key: Sequence[str]) -> str:
    return next((line.strip() for part in key for line in part.splitlines() if line.strip()), "")[:200]


def _named_files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str, Path]]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path.name, path
            continue
        for folder, subfolders, names in os.walk(path, followlinks=True):
            subfolders[:] = [name for name in subfolders if name != "__pycache__"]
            for name in names:
                file = Path(folder) / name
                yield file.relative_to(path).as_posix(), file


def _ours(status: os.stat_result) -> bool:
    """Only this user could have written it. (Windows keeps users' folders apart by itself.)"""
    return not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _check_place(folder: Path) -> None:
    """Make the directory of a kind, or raise OSError where somebody else could swap what lies in it."""
    parent = folder.parent
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = parent.stat()
    if hasattr(os, "geteuid"):
        open_to_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()) or open_to_all:
            raise PermissionError(f"{parent} belongs to another user or is writable by all")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or not _ours(status):
        raise PermissionError(f"{folder} is not a directory that only this user can write")


def _manifest(entry: Path) -> dict | None:
    try:
        manifest = json.loads((entry / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _verify(entry: Path, filename: str) -> bool:
    """Whether the entry is whole, ours, and of this very key."""
    try:
        statuses = [path.lstat() for path in (entry, entry / MANIFEST, entry / filename)]
        if not all(map(_ours, statuses)) or [stat.S_ISDIR(s.st_mode) for s in statuses] != [True, False, False]:
            return False
        if not all(stat.S_ISREG(s.st_mode) for s in statuses[1:]):
            return False
        manifest = _manifest(entry)
        if manifest is None or manifest.get("format") != FORMAT or manifest.get("digest") != entry.name:
            return False
        sums = manifest.get("sha256")
        return isinstance(sums, dict) and sums.get(filename) == _sha256(entry / filename)
    except FileNotFoundError:
        return False
    except OSError as error:
        log.info("the cache entry %s cannot be read (%s); it is built anew", entry, error)
        return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- building and publishing -------------------------------------------------------------------------------------


def _built(filename: str, build: Callable[[Path], None]) -> Path:
    """A directory with the build's result. It is the system's temporary one and not the cache's, so that a full or
    read-only cache directory cannot look like a failure of the compiler."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="kernops-build-"))
    except FileNotFoundError:  # no usable temporary directory at all
        parent = root() / "tmp"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
    build(folder)
    if not (folder / filename).is_file():
        raise FileNotFoundError(f"the build wrote no {filename!r} in {folder}; it holds {sorted(os.listdir(folder))}")
    return folder


def _save(entry: Path, made: Path, filename: str, description: str) -> None:
    """Copy a build into the cache and publish it by one rename."""
    folder = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))  # mode 0700
    try:
        sums = {}
        for file in sorted(made.iterdir()):
            if file.is_file():
                data = file.read_bytes()
                _write(folder / file.name, data)
                sums[file.name] = hashlib.sha256(data).hexdigest()
        manifest = {"format": FORMAT, "digest": entry.name, "description": description, "sha256": sums}
        _write(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        _publish(folder, entry, filename)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gone already where it was published


def _write(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _publish(folder: Path, entry: Path, filename: str) -> None:
    try:
        os.rename(folder, entry)
        return
    except OSError:
        if not os.path.lexists(entry):
            raise
    # Somebody was faster, or something broken lies there. Under the lock, because a second process that saw the same
    # broken entry must not move away the good one which the first has just put in its place.
    with _lock(entry.parent):
        if _verify(entry, filename):
            return
        log.info("the cache entry %s does not verify; it is replaced", entry)
        old = Path(tempfile.mkdtemp(prefix=".old-", dir=entry.parent))
        try:
            os.rename(entry, old / entry.name)
            os.rename(folder, entry)
        finally:
            shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held for a few renames only; where the file system has no locks, the renames alone have to do."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # explicit: a child forked meanwhile shares the handle
        os.close(handle)


def _warn_once(problem: OSError) -> None:
    text = f"{type(problem).__name__}: {problem}"
    if text not in _warned:
        _warned.add(text)
        log.warning("compiled code is not kept on disk, each process compiles anew (%s)", text)


def _remove_at_exit(folder: Path) -> None:
    maker = os.getpid()

    def remove() -> None:
        if os.getpid() == maker:  # a forked child inherits this hook, and must leave its parent's files alone
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
