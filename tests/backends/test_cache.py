"""The disk cache: hits, every kind of broken entry and directory, several processes at once, and its command line."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from kernops import __main__ as command_line
from kernops.backends import cache

KEY = ("struct Formula;", "g++ 12.2", "-O3")
NAME = "code.so"
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes of POSIX")


class Builder:
    """Writes a file and counts how often it was asked to."""

    def __init__(self, data: bytes = b"machine code") -> None:
        self.data, self.calls = data, 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / NAME).write_bytes(self.data)
        (folder / "code.cpp").write_text("source")


@pytest.fixture(autouse=True)
def forget(tmp_path_factory, monkeypatch):
    """A test starts as a new process does, and leaves nothing in the system's temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))
    monkeypatch.setattr(cache, "_unsaved", {})
    monkeypatch.setattr(cache, "_warned", set())


@pytest.fixture
def entry(empty_cache) -> Path:
    """The directory of a good entry."""
    return cache.artifact("cpu", KEY, NAME, Builder()).parent


def get(builder: Builder, key=KEY, **options) -> Path:
    return cache.artifact("cpu", key, NAME, builder, **options)


# ---- hits and keys -----------------------------------------------------------------------------------------------


def test_the_second_call_builds_nothing(empty_cache):
    builder = Builder()
    first = get(builder)
    assert get(builder) == first and builder.calls == 1
    assert first.read_bytes() == b"machine code"
    assert first.parent.parent == empty_cache / "cpu"
    assert (first.parent / "code.cpp").read_text() == "source"


@pytest.mark.parametrize(
    "other",
    [("struct Formula;", "g++ 12.3", "-O3"), ("struct Formula;", "g++ 12.2-O3"), (*KEY, ""), KEY[::-1]],
)
def test_every_part_of_the_key_counts(entry, other):
    builder = Builder(b"other code")
    assert get(builder, other).read_bytes() == b"other code"
    assert builder.calls == 1


def test_kinds_are_apart(entry):
    builder = Builder()
    assert cache.artifact("cuda", KEY, NAME, builder).parent != entry
    assert builder.calls == 1


def test_a_key_of_any_bytes(empty_cache):
    get(Builder(), (os.fsdecode(b"/opt/\xff/g++"),))


@pytest.mark.parametrize("kind", ["", "../cpu", "a/b", "CPU"])
def test_a_kind_is_a_plain_name(empty_cache, kind):
    with pytest.raises(ValueError, match="kind="):
        cache.artifact(kind, KEY, NAME, Builder())


def test_a_failing_build_passes_through_and_keeps_its_files(empty_cache):
    seen = []

    def build(folder: Path) -> None:
        (folder / "code.cpp").write_text("source")
        seen.append(folder)
        raise RuntimeError("error: expected ';'")

    with pytest.raises(RuntimeError, match="expected ';'"):
        cache.artifact("cpu", KEY, NAME, build)
    assert (seen[0] / "code.cpp").read_text() == "source"
    assert cache.entries() == []


def test_a_build_that_writes_nothing_is_an_error(empty_cache):
    with pytest.raises(FileNotFoundError, match=f"no '{NAME}'"):
        cache.artifact("cpu", KEY, NAME, lambda folder: None)


def test_nothing_is_left_beside_the_entry(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    path = get(Builder())
    assert os.listdir(tmp_path / "tmp") == []
    assert os.listdir(path.parent.parent) == [path.parent.name]


def test_headers_digest_sees_names_contents_and_links(tmp_path):
    def digest() -> str:
        return cache.headers_digest([tmp_path / "linked", tmp_path / "one.h"])

    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to("real")
    (tmp_path / "one.h").write_text("1")
    (tmp_path / "real" / "two.cuh").write_text("2")
    digests = [digest()]
    (tmp_path / "real" / "two.cuh").write_text("3")
    digests.append(digest())
    (tmp_path / "real" / "two.cuh").rename(tmp_path / "real" / "three.cuh")
    digests.append(digest())
    (tmp_path / "one.h").write_text("")
    digests.append(digest())
    assert len(set(digests)) == 4
    assert digest() == digests[-1]


# ---- entries that must not be loaded -----------------------------------------------------------------------------


def _change(name: str, change):
    def apply(entry: Path) -> None:
        path = entry / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def _set_manifest(**items):
    return _change(cache.MANIFEST, lambda data: json.dumps(json.loads(data) | items).encode())


def _folder_instead_of_file(entry: Path) -> None:
    (entry / NAME).unlink()
    (entry / NAME).mkdir()


def _file_instead_of_entry(entry: Path) -> None:
    entry.rename(entry.with_name("elsewhere"))
    entry.write_bytes(b"not a folder")


def _link_instead_of_entry(entry: Path) -> None:
    entry.rename(entry.with_name("elsewhere"))
    entry.symlink_to("elsewhere")


def _link_instead_of_file(entry: Path) -> None:
    (entry / NAME).rename(entry.parent / NAME)
    (entry / NAME).symlink_to(entry.parent / NAME)


BROKEN = {
    "truncated file": _change(NAME, lambda data: data[:-1]),
    "empty file": _change(NAME, lambda data: b""),
    "one bit": _change(NAME, lambda data: bytes([data[0] ^ 1]) + data[1:]),
    "no file": lambda entry: (entry / NAME).unlink(),
    "no manifest": lambda entry: (entry / cache.MANIFEST).unlink(),
    "truncated manifest": _change(cache.MANIFEST, lambda data: data[: len(data) // 2]),
    "manifest of bytes": _change(cache.MANIFEST, lambda data: b"\xff\xfe\x00"),
    "manifest of another type": _change(cache.MANIFEST, lambda data: b"[1, 2]"),
    "no checksums": _set_manifest(sha256=None),
    "another format": _set_manifest(format=cache.FORMAT + 1),
    "another key's entry": _set_manifest(digest="0" * 40),
    "folder in the file's place": _folder_instead_of_file,
    "file in the entry's place": _file_instead_of_entry,
    "link in the entry's place": _link_instead_of_entry,
    "link in the file's place": _link_instead_of_file,
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_entry_is_rebuilt_once(entry, how, caplog):
    BROKEN[how](entry)
    builder = Builder(b"built anew")
    assert get(builder) == entry / NAME and get(builder) == entry / NAME
    assert builder.calls == 1
    assert (entry / NAME).read_bytes() == b"built anew"
    assert not caplog.records, "a rebuilt entry is no warning"
    assert not [name for name in os.listdir(entry.parent) if name.startswith((".new", ".old"))]


@posix
@pytest.mark.parametrize("which", ["entry", "file", "manifest"])
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_owns_is_not_loaded(entry, which):
    os.chown({"entry": entry, "file": entry / NAME, "manifest": entry / cache.MANIFEST}[which], 12345, 12345)
    builder = Builder(b"ours")
    assert get(builder).read_bytes() == b"ours"
    assert builder.calls == 1
    assert get(builder).stat().st_uid == os.geteuid()


@posix
@pytest.mark.parametrize("which", ["entry", "file"])
def test_what_others_can_write_is_not_loaded(entry, which):
    (entry if which == "entry" else entry / NAME).chmod(0o777)
    builder = Builder(b"ours")
    assert get(builder).read_bytes() == b"ours"
    assert builder.calls == 1


@posix
def test_only_this_user_can_read_or_write(entry):
    old = os.umask(0)
    try:
        path = get(Builder(), ("another",))
    finally:
        os.umask(old)
    for folder in (path.parents[2], path.parents[1], path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


# ---- directories that cannot be used -----------------------------------------------------------------------------


def _survives(caplog, tries: int = 3) -> Path:
    """The call works, builds once in this process, and says why in one line."""
    builder = Builder()
    with caplog.at_level(logging.WARNING):
        paths = {get(builder) for _ in range(tries)}
        get(Builder(), ("another key",))
    assert len(paths) == 1 and builder.calls == 1
    assert len(caplog.records) == 1 and "not kept on disk" in caplog.text
    (path,) = paths
    assert path.read_bytes() == b"machine code"
    return path


def test_a_file_in_the_directorys_place(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNOPS_CACHE_DIR", str(tmp_path / "file"))
    _survives(caplog)


def test_a_directory_below_a_file(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNOPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    _survives(caplog)


@posix
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory(tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").mkdir(mode=0o500)
    monkeypatch.setenv("KERNOPS_CACHE_DIR", str(tmp_path / "cache"))
    _survives(caplog)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("function", ["mkdir", "write", "rename"])
def test_errors_of_the_disk(empty_cache, monkeypatch, caplog, code, function):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code), "x")

    target, name = {"mkdir": (cache.os, "mkdir"), "write": (cache, "_write"), "rename": (cache.os, "rename")}[function]
    with monkeypatch.context() as broken:  # the cache directory of this test outlives it
        made = _folders_made_before(broken)
        broken.setattr(target, name, fail)
        _survives(caplog)
    assert len(made) == 2 and cache.entries() == []


def _folders_made_before(monkeypatch) -> list[str]:
    """`os.mkdir` is also what tempfile uses: make the builds' folders before it is broken."""
    folders = [tempfile.mkdtemp(prefix="kernops-build-") for _ in range(4)]
    original = tempfile.mkdtemp

    def mkdtemp(prefix=None, dir=None, **kwargs):
        return folders.pop() if dir is None else original(prefix=prefix, dir=dir, **kwargs)

    monkeypatch.setattr(cache.tempfile, "mkdtemp", mkdtemp)
    return folders


@posix
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_directory_that_all_can_write(tmp_path, monkeypatch, caplog, mode):
    """Where others could swap our folder nothing is kept; where the sticky bit forbids it, as in /tmp, it is."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    monkeypatch.setenv("KERNOPS_CACHE_DIR", str(tmp_path / "cache"))
    if mode == 0o777:
        assert tmp_path not in _survives(caplog).parents
    else:
        assert tmp_path in get(Builder()).parents


@posix
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", [".", "cpu"])
def test_a_directory_of_another_user(empty_cache, caplog, which):
    (empty_cache / "cpu").mkdir(parents=True, mode=0o700)
    os.chown(empty_cache / which, 12345, 12345)
    assert empty_cache not in _survives(caplog).parents


def test_no_home_directory(monkeypatch, caplog):
    monkeypatch.delenv("KERNOPS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)
    _survives(caplog)
    assert "KERNOPS_CACHE_DIR" in caplog.text


def test_no_temporary_directory(empty_cache, monkeypatch):
    original = cache.tempfile.mkdtemp

    def mkdtemp(prefix=None, dir=None):
        if dir is None:
            raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
        return original(prefix=prefix, dir=dir)

    monkeypatch.setattr(cache.tempfile, "mkdtemp", mkdtemp)
    assert get(Builder()).parent.parent == empty_cache / "cpu"


UNSAVED = """
import os, pathlib, sys
from kernops.backends import cache
path = cache.artifact("cpu", ("k",), "f", lambda folder: (folder / "f").write_text("x") and None)
child = os.fork() if hasattr(os, "fork") else 1
if child == 0:
    sys.exit()  # runs the hooks that it inherits
child == 1 or os.waitpid(child, 0)
assert path.read_text() == "x"
print(path)
"""


def test_what_could_not_be_saved_goes_with_its_process(tmp_path):
    (tmp_path / "file").write_text("")
    environment = os.environ | {"KERNOPS_CACHE_DIR": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", UNSAVED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).parent.exists()


# ---- several at once ---------------------------------------------------------------------------------------------


def _race(start, results, delay: float) -> None:
    start.wait()
    builder = Builder(b"x" * 100_000)

    def build(folder: Path) -> None:
        time.sleep(delay)
        builder(folder)

    for number in range(5):
        path = cache.artifact("cpu", (str(number),), NAME, build)
        results.put((builder.calls, path.read_bytes() == builder.data))


@pytest.mark.parametrize("broken", [False, True])
def test_processes_at_once_all_succeed(empty_cache, broken):
    """With broken entries all of them see the same bad folder and want to replace it."""
    if broken:
        for number in range(5):
            path = get(Builder(), (str(number),))
            path.write_bytes(b"broken")
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_race, args=(start, results, 0.05)) for _ in range(4)]
    for worker in workers:
        worker.start()
    right = [results.get(timeout=120)[1] for _ in range(20)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert all(right)
    names = os.listdir(empty_cache / "cpu")
    assert len([name for name in names if not name.startswith(".")]) == 5
    assert not [name for name in names if name.startswith((".new", ".old"))]


def test_threads_at_once_all_succeed(empty_cache):
    barrier, paths = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        paths.append(get(Builder()).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [b"machine code"] * 8


def test_a_good_entry_is_not_replaced_by_one_who_saw_a_broken_one(entry, monkeypatch):
    """Two processes saw it broken; the first has replaced it while the second was building."""
    (entry / NAME).write_bytes(b"broken")
    first, second = Builder(b"first"), Builder(b"second")

    def build(folder: Path) -> None:
        second(folder)
        get(first)
        inode.append((entry / NAME).stat().st_ino)

    inode: list[int] = []
    assert cache.artifact("cpu", KEY, NAME, build).read_bytes() == b"first"
    assert (entry / NAME).stat().st_ino == inode[0]


# ---- where it is, and the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/kernops"),
        ("linux", {"XDG_CACHE_HOME": "{}/xdg"}, "xdg/kernops"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache/kernops"),
        ("linux", {"XDG_CACHE_HOME": ""}, "home/.cache/kernops"),
        ("darwin", {}, "home/Library/Caches/kernops"),
        ("win32", {}, "home/AppData/Local/kernops"),
        ("win32", {"LOCALAPPDATA": "{}/local"}, "local/kernops"),
        ("linux", {"KERNOPS_CACHE_DIR": "{}/own"}, "own"),
        ("linux", {"KERNOPS_CACHE_DIR": "~/own"}, "home/own"),
        ("linux", {"KERNOPS_CACHE_DIR": ""}, "home/.cache/kernops"),
    ],
)
def test_default_places(tmp_path, monkeypatch, platform, variables, expected):
    for name in ("KERNOPS_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.setattr(cache.sys, "platform", platform)
    assert cache.root() == tmp_path / expected


def test_a_relative_directory_is_of_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNOPS_CACHE_DIR", "here")
    assert cache.root() == tmp_path / "here"


def test_list_size_and_clear(empty_cache, capsys):
    old = get(Builder(), ("old",), description="Gaussian")
    os.utime(old.parent, (time.time() - 7200,) * 2)
    young = cache.artifact("cuda", ("\n  struct Formula {\n};", "sm_90a"), NAME, Builder(b"x" * 5000))

    assert command_line.main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kind", "digest", "size", "age", "description"]
    assert lines[1].split()[:2] == ["cuda", young.parent.name[:12]] and lines[1].endswith("struct Formula {")
    assert lines[2].split()[:2] == ["cpu", old.parent.name[:12]] and lines[2].endswith("2 h  Gaussian")
    assert lines[3].startswith("2 entries, 5.") and lines[3].endswith(f" kB, in {empty_cache}")

    assert command_line.main(["cache", "size"]) == 0
    assert capsys.readouterr().out == lines[3] + "\n"
    assert command_line.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == "removed " + lines[3].replace(" in ", " from ") + "\n"
    assert cache.entries() == [] and not young.exists()
    assert command_line.main(["cache", "list"]) == 0
    assert capsys.readouterr().out == f"0 entries, 0 B, in {empty_cache}\n"


def test_clear_removes_nothing_that_is_not_an_entry(empty_cache):
    """KERNOPS_CACHE_DIR may have been set to a folder of other things."""
    path = get(Builder())
    others = [empty_cache / "thesis.tex", empty_cache / "photos" / "me.png", path.parents[1] / "notes.txt"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("dear to somebody")
    (path.parents[1] / ".new-abandoned").mkdir()
    assert cache.clear()[0] == 1
    assert all(other.exists() for other in others)
    assert not path.parent.exists() and not (path.parents[1] / ".new-abandoned").exists()


def test_a_broken_entry_is_listed_and_cleared(entry, capsys):
    (entry / cache.MANIFEST).write_bytes(b"")
    assert [e.description for e in cache.entries()] == [""]
    assert cache.clear()[0] == 1 and not entry.exists()


@pytest.mark.parametrize("arguments", [[], ["cash"], ["cache", "drop"], ["cache", "list", "more"]])
def test_a_wrong_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        command_line.main(arguments)
    assert caught.value.code == 2 and "usage: python -m kernops" in capsys.readouterr().err


def test_no_home_directory_on_the_command_line(monkeypatch, capsys):
    monkeypatch.delenv("KERNOPS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)
    assert command_line.main(["cache", "size"]) == 1
    assert "KERNOPS_CACHE_DIR" in capsys.readouterr().err
