# SPDX-License-Identifier: Apache-2.0
"""Where the cache lies: nobody else can have put anything there; modes follow the umask."""

import logging
import os
import pwd
import stat
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from coda_inductor import cache_dir as module
from coda_inductor.cache_dir import cache_dirs, folder, private_dir, write

STRANGER = 4242


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A home and a temporary directory that everybody may write to, as /tmp; nothing is cached."""
    home, temp = tmp_path / "home", tmp_path / "temp"
    home.mkdir()
    temp.mkdir()
    temp.chmod(0o1777)
    for name in ("CODA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    yield tmp_path
    forget()


def forget():
    module._find.cache_clear()
    private_dir.cache_clear()


def expect(caplog, own: Path, warns: bool = False, read_only: Path | None = None) -> None:
    """These folders are found, with or without one warning."""
    forget()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "coda_inductor"):
        assert cache_dirs() == (own, read_only)
    assert len(caplog.messages) == warns


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def belongs(monkeypatch):
    """Makes a path look as if it were a stranger's."""
    theirs: set[str] = set()
    real_stat, real_lstat = Path.stat, Path.lstat

    def changed(path, info):
        stranger = os.stat_result((*info[:4], STRANGER, *info[5:]))
        return stranger if str(path) in theirs else info

    monkeypatch.setattr(Path, "stat", lambda p, **how: changed(p, real_stat(p, **how)))
    monkeypatch.setattr(Path, "lstat", lambda p: changed(p, real_lstat(p)))
    return lambda path: theirs.add(str(path))


@pytest.fixture
def no_home(place):
    """A home in which no folder can be made: a file is in its place."""
    (place / "home" / ".cache").write_text("")
    return place / "temp" / f"coda_inductor_uid_{os.geteuid()}"


def test_the_default_is_in_the_home_and_private(place, caplog, umask, monkeypatch):
    """A relative XDG folder does not count."""
    umask(0)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    expect(caplog, own := place / "home" / ".cache" / "coda_inductor")
    assert mode(own) == mode(folder("kernels", "version")) == 0o700


@pytest.mark.parametrize("what", ["open", "a link", "a stranger's", "anybody renames"])
def test_a_planted_folder_is_not_used(what, no_home, caplog, belongs):
    if what == "anybody renames":
        no_home.parent.chmod(0o777)
    elif what == "a link":
        (no_home.parent / "elsewhere").mkdir(mode=0o700)
        no_home.symlink_to(no_home.parent / "elsewhere")
    else:
        no_home.mkdir(mode=0o755 if what == "open" else 0o700)
    if what == "a stranger's":
        belongs(no_home)
    forget()
    own, read_only = cache_dirs()
    assert read_only is None
    assert own.name.startswith(f"{no_home.name}_")
    assert mode(own) == 0o700
    assert not own.is_symlink()
    assert len(caplog.messages) == 1


def test_a_chosen_folder_is_trusted_unless_everybody_may_write_to_it(
    place, caplog, monkeypatch, belongs
):
    chosen = place / "shared"
    chosen.mkdir()
    chosen.chmod(0o2775)
    belongs(chosen)
    monkeypatch.setenv("CODA_CACHE_DIR", str(chosen))
    expect(caplog, chosen)
    chosen.chmod(0o777)
    own = place / "home" / ".cache" / "coda_inductor"
    expect(caplog, own, warns=True)
    chosen.chmod(0o755)
    place.chmod(0o777)
    try:
        forget()
        assert cache_dirs()[0] != chosen
    finally:
        place.chmod(0o700)


def test_what_a_stranger_made_in_the_temporary_directory(place, caplog, monkeypatch, belongs):
    link = place / "temp" / "link"
    link.symlink_to(place / "home")
    monkeypatch.setenv("CODA_CACHE_DIR", str(link))
    expect(caplog, link)
    belongs(link)
    expect(caplog, place / "home" / ".cache" / "coda_inductor", warns=True)


def test_the_default_must_be_ours(place, caplog, belongs, monkeypatch):
    """What can only be read is read besides."""
    image = place / "image"
    image.mkdir()
    theirs = place / "home" / ".cache" / "coda_inductor"
    with monkeypatch.context() as patch:
        patch.setenv("CODA_CACHE_DIR", str(image))
        patch.setattr(module, "writable", lambda path: path != image)
        expect(caplog, theirs, read_only=image)
    theirs.rmdir()
    theirs.mkdir(parents=True)
    expect(caplog, theirs)
    belongs(theirs)
    own = place / "temp" / f"coda_inductor_uid_{os.geteuid()}"
    expect(caplog, own, warns=True)


def test_a_user_without_home_and_name_and_a_chosen_folder_that_cannot_be_made(
    place, caplog, monkeypatch
):
    monkeypatch.setattr(os, "environ", {"CODA_CACHE_DIR": os.devnull})
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError("uid not found")))
    own = place / "temp" / f"coda_inductor_uid_{os.getuid()}"
    expect(caplog, own, warns=True)
    assert mode(own) == 0o700
    (own / "kept").touch()
    expect(caplog, own, warns=True)


def test_modes_follow_the_umask(place, monkeypatch, umask):
    """A group's folder stays the group's, whatever umask its members have."""
    umask(0o077)
    monkeypatch.setenv("CODA_CACHE_DIR", str(place / "chosen"))
    own, _ = cache_dirs()
    write(own / "measured" / "one", "text")
    assert mode(own / "measured" / "one") == 0o600
    assert mode(own / "measured") == mode(own) == 0o700
    umask(0o022)
    own.chmod(0o775)
    forget()
    assert mode(folder("kernels", "version")) == 0o775


def test_a_full_disk_leaves_no_files(tmp_path, monkeypatch):
    target = tmp_path / "new" / "file"
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write(target, "text")
    assert list(target.parent.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_home_that_belongs_to_somebody_else_is_not_used(place):
    """As in a container that runs under another uid: nothing below it can even be looked at."""
    for outer in (place, *place.parents[:-1]):  # pytest's own folders are root's alone
        outer.chmod(outer.stat().st_mode | 0o011)
    (place / "home").chmod(0o700)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        try:
            os.write(writer, str(cache_dirs()).encode())
        except OSError as error:
            os.write(writer, repr(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert str(place / "temp") in os.read(reader, 4096).decode()
