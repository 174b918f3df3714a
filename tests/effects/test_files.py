"""Files: every lie of a read-only tool is caught, no honest look is taken for one, and what was kept is put back."""

from __future__ import annotations

import os
import random
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from interlock import Failure
from interlock.contract.effects import Change
from interlock.effects import files
from interlock.effects.files import FileWatcher
from interlock.effects.session import SessionState
from interlock.effects.watch import judge
from tests.needs import missing

OLD_S = 1_700_000_000


def plant(root: Path) -> None:
    """A tree with a bit of everything."""
    (root / "deep" / "deeper").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "deep/c.txt", "deep/deeper/d.txt"):
        (root / name).write_text(f"this is {name}")
    (root / "link").symlink_to("a.txt")
    os.link(root / "b.txt", root / "second name of b")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    plant(root)
    return root


def write_and_hide(root: Path) -> None:
    """Change a file, keep its size, and set its times back."""
    path = root / "a.txt"
    status = path.stat()
    path.write_bytes(b"X" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def let_a_user_in(root: Path, kind: str = "system.posix_acl_access") -> None:
    """Give a user of the host rights in a directory by its access control list, and leave its mode as it was."""
    mode = (root / "deep").stat().st_mode
    owner, group, others = (mode >> 6) & 7, (mode >> 3) & 7, mode & 7
    nobody, user = 0xFFFFFFFF, 12345
    entries = [(1, owner, nobody), (2, group, user), (4, group, nobody), (16, group, nobody), (32, others, nobody)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(root / "deep", kind, packed)


def swap(root: Path) -> None:
    """Put another file of the same size and times in a file's place."""
    path = root / "a.txt"
    status = path.stat()
    (root / "new").write_bytes(b"X" * status.st_size)
    os.utime(root / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (root / "new").replace(path)


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("more")


def swap_link(link: Path, target: str) -> None:
    link.unlink()
    link.symlink_to(target)


def file_for_directory(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a directory")


Lie = Callable[[Path], object]
EVERYTHING = (
    "",
    "a.txt",
    "b.txt",
    "deep",
    "deep/c.txt",
    "deep/deeper",
    "deep/deeper/d.txt",
    "link",
    "second name of b",
)

# What a tool does, and what it created, updated and deleted by it. Lies are also told one after the other: none of them
# makes a link that leads out of the tree, or writes where another made a pipe.
LIES: dict[str, tuple[Lie, str, str, Sequence[str]]] = {
    "create": (lambda root: (root / "new").write_text("x"), "new", "", ()),
    "mkdir": (lambda root: (root / "new").mkdir(), "new", "", ()),
    "fifo": (lambda root: os.mkfifo(root / "pipe"), "pipe", "", ()),
    "symlink": (lambda root: (root / "way").symlink_to("deep/c.txt"), "way", "", ()),
    "hard link": (lambda root: os.link(root / "a.txt", root / "new"), "new", "a.txt", ()),
    "write": (lambda root: (root / "a.txt").write_text("other"), "", "a.txt", ()),
    "append": (lambda root: append(root / "a.txt"), "", "a.txt", ()),
    "truncate": (lambda root: os.truncate(root / "a.txt", 0), "", "a.txt", ()),
    "write and hide": (write_and_hide, "", "a.txt", ()),
    "swap": (swap, "", "a.txt", ()),
    "touch": (lambda root: os.utime(root / "a.txt"), "", "a.txt", ()),
    "chmod": (lambda root: (root / "a.txt").chmod(0o600), "", "a.txt", ()),
    "chmod of a directory": (lambda root: (root / "deep").chmod(0o700), "", "deep", ()),
    "an attribute of a file": (lambda root: os.setxattr(root / "a.txt", "user.a", b"x"), "", "a.txt", ()),
    "an attribute of a directory": (lambda root: os.setxattr(root / "deep", "user.a", b"x"), "", "deep", ()),
    "an access list of a directory": (let_a_user_in, "", "deep", ()),
    "an access list for what is made in a directory": (
        lambda root: let_a_user_in(root, "system.posix_acl_default"), "", "deep", ()
    ),
    "turn a symlink": (lambda root: swap_link(root / "link", "b.txt"), "", "link", ()),
    "delete": (lambda root: (root / "deep/c.txt").unlink(), "", "", ["deep/c.txt"]),
    "rename": (lambda root: (root / "a.txt").rename(root / "z"), "z", "", ["a.txt"]),
    "rename over": (lambda root: (root / "a.txt").rename(root / "deep/c.txt"), "", "deep/c.txt", ["a.txt"]),
    "file for directory": (
        lambda root: file_for_directory(root / "deep/deeper"), "", "deep/deeper", ["deep/deeper/d.txt"]
    ),
    "remove it all": (shutil.rmtree, "", "", EVERYTHING),
}  # fmt: skip


def told(changes: list[Change], root: Path) -> set[tuple[str, str]]:
    prefix = f"file:{root}"
    return {(change.resource.removeprefix(prefix).lstrip("/"), change.operation) for change in changes}


@pytest.mark.proves("EFFECT-03")
@pytest.mark.parametrize("lie", LIES)
async def test_each_lie_is_caught_and_named(root: Path, lie: str) -> None:
    act, created, updated, deleted = LIES[lie]
    expected = {(name, "DELETE") for name in deleted}
    expected |= {(name, operation) for name, operation in ((created, "CREATE"), (updated, "UPDATE")) if name}
    watcher = FileWatcher([root])
    before = await watcher.before()
    act(root)
    changes = await watcher.after(before)
    assert told(changes, root) == expected
    verdict = judge("read_only", (), changes)
    assert verdict.finding == "MUTATION_CLASS_VIOLATION"
    assert verdict.outside == tuple(changes)


async def test_giving_a_file_away_is_caught(root: Path) -> None:
    if os.geteuid() != 0:
        missing("only root may give files away: run the tests as root")
    watcher = FileWatcher([root])
    before = await watcher.before()
    os.chown(root / "a.txt", 1000, 1000)
    assert told(await watcher.after(before), root) == {("a.txt", "UPDATE")}


HONEST: list[Callable[[Path], object]] = [
    lambda root: (root / "a.txt").read_bytes(),
    lambda root: (root / "link").read_text(),
    lambda root: (root / "deep/c.txt").stat(),
    lambda root: os.listdir(root / "deep"),
    lambda root: list(os.walk(root)),
    lambda root: (root / "link").readlink(),
    lambda root: os.access(root / "b.txt", os.W_OK),
    lambda root: (root / "a.txt").open("r+").close(),
    lambda root: (root / "a.txt").open("a").close(),
    lambda root: os.utime in os.supports_fd and os.statvfs(root),
]


@pytest.mark.proves("EFFECT-03")
async def test_a_thousand_honest_looks_are_never_taken_for_a_change(root: Path) -> None:
    watcher = FileWatcher([root])
    chance = random.Random(7)
    for _ in range(100):
        before = await watcher.before()
        for _ in range(10):
            chance.choice(HONEST)(root)
        assert await watcher.after(before) == []


async def test_a_read_that_moves_the_time_of_access_is_honest(root: Path) -> None:
    path = root / "a.txt"
    os.utime(path, (OLD_S, OLD_S))
    watcher = FileWatcher([root])
    before = await watcher.before()
    path.read_bytes()
    assert await watcher.after(before) == []


async def test_a_change_within_the_tick_of_another_is_seen_by_its_content(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = FileWatcher([root])
    monkeypatch.setattr(files, "TICK_NS", 3600 * 10**9)  # however long ago: the tree was planted within the tick
    before = await watcher.before()
    place = next(place for place in before if place[-1] == "a.txt")
    assert before[place].digest is not None
    (root / "a.txt").write_text("THIS IS a.txt")
    # As if the kernel's clock had not moved on: all that it says is what it said before.
    status = (root / "a.txt").stat()
    before[place] = before[place]._replace(mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns)
    assert told(await watcher.after(before), root) == {("a.txt", "UPDATE")}
    monkeypatch.setattr(files, "TICK_NS", -time.time_ns())
    assert (await watcher.before())[place].digest is None


async def test_roots_go_by_the_names_they_are_given(root: Path) -> None:
    watcher = FileWatcher({"workspace:main/": root, "file:/missing": root / "missing"})
    assert watcher.resources == ("workspace:main", "file:/missing")
    before = await watcher.before()
    (root / "a.txt").unlink()
    (root / "missing").write_text("x")
    (root / os.fsdecode(b"caf\xe9")).write_text("x")
    changes = {(change.resource, change.operation) for change in await watcher.after(before)}
    assert changes == {
        ("workspace:main/a.txt", "DELETE"),
        ("workspace:main/missing", "CREATE"),
        ("workspace:main/caf\\xe9", "CREATE"),
        ("file:/missing", "CREATE"),
    }


async def test_more_than_can_be_watched_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_ENTRIES", 5)
    with pytest.raises(Failure) as caught:
        await FileWatcher([root]).before()
    assert caught.value.code == "E3407"


# Putting back


def picture(root: Path) -> dict[str, tuple[int, bytes | str | None]]:
    """What can be seen of a tree: names, modes, contents, targets."""
    seen: dict[str, tuple[int, bytes | str | None]] = {}
    for path in sorted([root, *root.rglob("*")]):
        mode = path.lstat().st_mode
        content = os.readlink(path) if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else None
        seen[str(path.relative_to(root))] = (mode, content)
    return seen


@pytest.mark.proves("EFFECT-03")
@given(st.lists(st.sampled_from(sorted(LIES)), min_size=1, max_size=4))
async def test_what_was_kept_is_put_back_after_any_lies(lies: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "root"
        root.mkdir()
        plant(root)
        watcher = FileWatcher([root], keep=True)
        before, then = await watcher.before(), picture(root)
        for lie in lies:
            try:
                LIES[lie][0](root)
            except OSError:
                continue  # an earlier lie left nothing to lie about
        assert await watcher.restore(before) == []
        assert picture(root) == then
        assert await watcher.restore(before) == []


async def test_a_file_that_is_still_the_same_is_mended_in_place(root: Path) -> None:
    watcher = FileWatcher([root], keep=True)
    before = await watcher.before()
    inode = (root / "b.txt").stat().st_ino
    (root / "b.txt").write_text("overwritten")
    assert await watcher.restore(before) == []
    assert (root / "b.txt").stat().st_ino == (root / "second name of b").stat().st_ino == inode


async def test_putting_back_does_not_follow_a_link_out_of_the_root(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "c.txt").write_text("not yours")
    watcher = FileWatcher([root], keep=True)
    before = await watcher.before()
    shutil.rmtree(root / "deep")
    (root / "deep").symlink_to(outside)
    assert await watcher.restore(before) == []
    assert not (root / "deep").is_symlink()
    assert (root / "deep/c.txt").read_text() == "this is deep/c.txt"
    assert [path.name for path in outside.iterdir()] == ["c.txt"]
    assert (outside / "c.txt").read_text() == "not yours"


async def test_what_was_not_kept_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "KEEP_FILE_BYTES", 12)
    watcher = FileWatcher([root], keep=True)
    before = await watcher.before()
    (root / "a.txt").write_text("other")
    (root / "deep/deeper/d.txt").unlink()
    (root / "new").write_text("x")
    assert told(await watcher.restore(before), root) == {("a.txt", "UPDATE"), ("deep/deeper/d.txt", "DELETE")}
    assert not (root / "new").exists()


# The verdict


def change(resource: str, operation: str = "UPDATE") -> Change:
    return Change(resource=resource, operation=operation)  # pyright: ignore[reportArgumentType] - one of three words


@pytest.mark.parametrize(
    ("predicted", "detected", "finding"),
    [
        (change("file:/srv"), change("file:/srv/a.txt"), "ok"),
        (change("file:/srv/*"), change("file:/srv/a.txt"), "ok"),
        (change("file:/srv/x/../a.txt"), change("file:/srv/a.txt"), "ok"),
        (change("account:*"), change("account:cash"), "ok"),
        (change("file:/srv/a.txt"), change("file:/srv/b.txt"), "UNDECLARED_EFFECT"),
        (change("file:/srv/a.txt"), change("file:/srv"), "UNDECLARED_EFFECT"),
        (change("file:/srv/a.txt"), change("file:/srv/a.txt", "DELETE"), "UNDECLARED_EFFECT"),
        (change("file:../../a.txt"), change("file:/srv/a.txt"), "UNDECLARED_EFFECT"),
    ],
)
def test_a_write_tool_keeps_to_the_resources_and_operations_of_its_manifest(
    predicted: Change, detected: Change, finding: str
) -> None:
    assert judge("write_reversible", [predicted], [detected]).finding == finding
    assert judge("write_irreversible", [predicted], []).ok


@pytest.mark.proves("EFFECT-03")
def test_a_session_value_counts_as_a_change() -> None:
    session = SessionState(lambda: (1, '{"count": 1, "list": [1]}'))
    assert judge("read_only", (), (), session.changes()).ok
    session["count"] = 2
    session["list"].append(2)
    verdict = judge("read_only", (), (), session.changes())
    assert verdict.finding == "MUTATION_CLASS_VIOLATION"
    assert {one.resource for one in verdict.outside} == {"session:count", "session:list"}
    assert judge("write_reversible", [change("session:*")], (), session.changes()).ok
    assert judge("write_reversible", [change("session:list")], (), session.changes()).outside[0].after == 2
