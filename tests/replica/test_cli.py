"""The command: exact JSON, exit codes that scripts can trust, and nothing removed by surprise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from erasure.digest import CHUNK_BYTES, chunk_digests
from recovery.manifest import Generation, SlotRecord, shard_digest
from replica import cli
from replica.errors import ConfigError
from tests.sources import ROOT

COMMANDS = ("status", "verify", "clean")
"""Those that look at arenas."""
LAUNCH = "import sys; sys.argv[0] = '/bin/planaria'; from replica.cli import main; "
PROGRAM = [sys.executable, "-c", f"{LAUNCH}sys.exit(main())"]
"""The command as its own process, started as pip's script starts it."""


def generation(epoch: int, step: int) -> Generation:
    """Make a generation whose id follows from its step."""
    return Generation(epoch=epoch, step=step, id=f"{step:032x}")


def record(**changes) -> SlotRecord:
    """Describe fragment 1 of 2+1 of owner 3, 500 of 1000 bytes."""
    digests = chunk_digests(np.zeros(500, np.uint8), CHUNK_BYTES)
    facts = {
        "job": "job",
        "generation": generation(2, 40),
        "owner": 3,
        "world": 4,
        "k": 2,
        "m": 1,
        "fragment": 1,
        "shard_bytes": 1000,
        "length": 500,
        "chunk_bytes": CHUNK_BYTES,
        "chunk_digests": digests,
        "shard_digest": shard_digest(digests, 1000),
    }
    return SlotRecord(**facts | changes)


def run(capsys, *argv) -> tuple[int, str, str]:
    """Run the command in this process: (exit code, standard output, standard error)."""
    try:
        code = cli.main([str(word) for word in argv])
    except SystemExit as left:
        code = left.code
    return (code, *capsys.readouterr())


def status(capsys, arena_dir, *more) -> dict:
    """Return what ``status --json`` prints, which must be one JSON object and nothing else."""
    code, out, err = run(capsys, "status", "--json", "--arena-dir", arena_dir, *more)
    assert (code, err, out.count("\n")) == (0, "", 1)
    return json.loads(out)


# --- status


def test_the_json_has_every_field_of_every_arena(open_arena, arena_dir, capsys):
    """Two slots, one with a record: all fields and values as documented, in plain JSON types."""
    arena = open_arena(job="job", node_id="n", position=2, rank=3, world=4)
    arena.allocate(1000, "own")
    held = arena.allocate(500, "held")
    held.write_record(record())
    arena.update_head(epoch=2, committed=generation(2, 40), restored=generation(1, 30))
    empty = {"owner": None, "step": None, "epoch": None, "generation": None, "fragment": None}
    filled = {"owner": 3, "step": 40, "epoch": 2, "generation": f"{40:032x}", "fragment": 1}
    assert status(capsys, arena_dir) == {
        "arenas": [
            {
                "job": "job",
                "node_id": "n",
                "position": 2,
                "rank": 3,
                "world": 4,
                "epoch": 2,
                "committed_step": 40,
                "restored_step": 30,
                "alive": True,
                "pid": os.getpid(),
                "bytes": 1500,
                "path": arena.path,
                "slots": [
                    {"slot": 0, "kind": "own", "bytes": 1000, **empty},
                    {"slot": 1, "kind": "held", "bytes": 500, **filled},
                ],
            }
        ],
        "committed_step": 40,
        "jobs": {"job": {"committed_step": 40}},
        "generations": [
            {
                "job": "job",
                "epoch": 2,
                "step": 40,
                "generation": f"{40:032x}",
                "world": 4,
                "committed": True,
                "holders": [{"owner": 3, "fragment": 1, "rank": 3, "node_id": "n"}],
                "recoverable_owners": [],
                "missing_owners": {
                    "0": "0 of 2 distinct fragments and no whole copy",
                    "1": "0 of 2 distinct fragments and no whole copy",
                    "2": "0 of 2 distinct fragments and no whole copy",
                    "3": "1 of 2 distinct fragments and no whole copy",
                },
                "protection": None,
                "exact": False,
            }
        ],
    }


def test_a_dead_job_is_shown_and_a_damaged_head_is_null(open_arena, arena_dir, capsys):
    """A closed arena is not alive and has no pid; without a head its fields are null."""
    arena = open_arena()
    arena.close()
    [shown] = status(capsys, arena_dir)["arenas"]
    assert (shown["alive"], shown["pid"], shown["job"]) == (False, None, "job")
    Path(arena.path, "head").write_bytes(b"?")
    [shown] = status(capsys, arena_dir)["arenas"]
    assert (shown["alive"], shown["pid"], shown["job"]) == (False, None, None)
    assert (shown["rank"], shown["committed_step"], shown["path"]) == (None, None, arena.path)


def test_the_newest_step_is_so_by_epoch_first(open_arena, arena_dir, capsys):
    """After a roll-back from 200 to 100 the abandoned 200 of the older epoch does not win."""
    open_arena(position=0).update_head(committed=generation(1, 200))
    open_arena(position=1).update_head(committed=generation(2, 100))
    open_arena(position=2)
    assert status(capsys, arena_dir)["committed_step"] == 100


def test_one_job_or_none(open_arena, arena_dir, capsys):
    """--job shows that job alone; no arenas at all is an empty list and null, not an error."""
    empty = {"arenas": [], "committed_step": None, "jobs": {}, "generations": []}
    assert status(capsys, arena_dir) == empty
    open_arena(job="a").update_head(committed=generation(1, 1))
    open_arena(job="b").update_head(committed=generation(1, 2))
    shown = status(capsys, arena_dir, "--job", "a")
    assert ([arena["job"] for arena in shown["arenas"]], shown["committed_step"]) == (["a"], 1)
    assert status(capsys, arena_dir, "--job", "c")["arenas"] == []


def test_status_for_people_says_the_same(open_arena, arena_dir, capsys):
    """The text names job, rank, process, steps and what every slot holds."""
    arena = open_arena(rank=1, world=2)
    arena.allocate(1000, "own")
    arena.allocate(500, "held").write_record(record(owner=1, world=2))
    arena.allocate(1000, "held").write_record(whole())
    arena.update_head(committed=generation(2, 40))
    code, out, _ = run(capsys, "status", "--arena-dir", arena_dir)
    assert code == 0
    for part in (
        "job job  node node  position 0  rank 1 of 2",
        f"pid {os.getpid()}",
        "committed step 40",
        "slot 0 (own, 1000 bytes): nothing valid",
        "slot 1 (held, 500 bytes): fragment 1 of owner 1, step 40, epoch 2",
        "slot 2 (held, 1000 bytes): whole shard of owner 3, step 40, epoch 2",
        "job job: newest committed step 40",
    ):
        assert part in out
    arena.close()
    closed = "position 0  rank 1 of 2 when last opened  not running"
    assert closed in run(capsys, "status", "--arena-dir", arena_dir)[1]


def whole() -> SlotRecord:
    """Describe a whole shard of owner 3 in 1000 bytes."""
    parts = [chunk_digests(np.zeros(500, np.uint8), CHUNK_BYTES)] * 2
    return record(
        fragment=-1,
        length=1000,
        chunk_digests=b"".join(parts),
        shard_digest=shard_digest(b"".join(parts), 1000),
    )


def test_the_directory_comes_from_the_environment(open_arena, arena_dir, capsys, monkeypatch):
    """Without --arena-dir, PLANARIA_ARENA_DIR is looked at; the option wins over it."""
    open_arena()
    monkeypatch.setenv("PLANARIA_ARENA_DIR", str(arena_dir))
    assert len(json.loads(run(capsys, "status", "--json")[1])["arenas"]) == 1
    other = arena_dir / "other"
    other.mkdir()
    assert status(capsys, other)["arenas"] == []


@pytest.mark.parametrize("command", ["status", "verify", "clean"])
def test_a_directory_that_is_not_there_is_one_sentence_and_exit_1(arena_dir, capsys, command):
    """No traceback: the path is named on standard error, and standard output stays empty."""
    code, out, err = run(capsys, command, "--arena-dir", arena_dir / "missing")
    assert (code, out) == (1, "")
    assert err.startswith("planaria: ")
    assert "missing does not exist" in err


# --- clean


def test_clean_without_a_job_only_lists(open_arena, arena_dir, capsys):
    """Nothing goes without --job or --all: the paths are listed, exit code 1, and what to say."""
    arena = open_arena()
    arena.close()
    code, out, err = run(capsys, "clean", "--arena-dir", arena_dir)
    assert (code, out) == (1, f"{arena.path}\n")
    assert "--all" in err
    assert Path(arena.path, "head").exists()
    assert run(capsys, "clean", "--arena-dir", arena_dir, "--all") == (0, f"{arena.path}\n", "")
    assert run(capsys, "clean", "--arena-dir", arena_dir) == (0, "", "")


@pytest.mark.parametrize("choice", [["--job", "a"], ["--all"], []])
def test_a_dry_run_lists_and_keeps(open_arena, arena_dir, capsys, choice):
    """--dry-run prints what would go, exits 0, and removes nothing."""
    path = open_arena(job="a").path
    told = f"in use, not removed: {path}\n" if choice else ""
    assert run(capsys, "clean", "--arena-dir", arena_dir, *choice, "--dry-run") == (0, "", told)
    open_arena(job="b").close()
    open_arena(job="a", position=1).close()
    _, out, _ = run(capsys, "clean", "--arena-dir", arena_dir, *choice, "--dry-run")
    assert len(out.splitlines()) == (1 if "--job" in choice else 2)
    assert all(line.startswith(f"would remove {arena_dir}") for line in out.splitlines())
    assert f"would remove {path}" not in out.splitlines()
    assert len(status(capsys, arena_dir)["arenas"]) == 3


def test_clean_tells_programs_what_it_did(open_arena, arena_dir, capsys):
    """With --json: one object, by whether arenas were removed, only listed, or left in use."""
    living = open_arena(job="living").path
    dead = open_arena(job="dead")
    dead.close()

    def told(*more):
        code, out, err = run(capsys, "clean", "--json", "--arena-dir", arena_dir, *more)
        return code, json.loads(out), err

    listed = {"removed": [], "removable": [dead.path], "in_use": [living]}
    code, report, err = told()
    assert (code, report) == (1, listed)
    assert "--all" in err
    assert told("--dry-run") == (0, listed, "")
    removed = {"removed": [dead.path], "removable": [], "in_use": []}
    assert told("--job", "dead") == (0, removed, "")
    assert told("--all") == (0, {"removed": [], "removable": [], "in_use": [living]}, "")


def test_clean_removes_one_dead_job(open_arena, arena_dir, capsys):
    """Of two dead jobs and a living one the named dead one goes."""
    gone = open_arena(job="gone")
    gone.close()
    open_arena(job="other").close()
    told = f"in use, not removed: {open_arena(job='living').path}\n"
    none = f"no arenas of job 'nobody' of this user in {arena_dir}\n"
    for job, out, err in (
        ("gone", f"{gone.path}\n", ""),
        ("living", "", told),
        ("nobody", "", none),
    ):
        assert run(capsys, "clean", "--arena-dir", arena_dir, "--job", job) == (0, out, err)
    left = [arena["job"] for arena in status(capsys, arena_dir)["arenas"]]
    assert left == ["living", "other"]


KILLED = """
arena = Arena.open(DIR, **OPEN)
arena.allocate(5000, "own")
arena.allocate(5000, "held")
say(arena.path)
wait()
"""


def leave_behind(children, arena_dir) -> Path:
    """Have a process killed that had an arena; half-made files and a sibling lie there too."""
    child = children.start(KILLED, arena_dir)
    path = Path(child.hear())
    child.end()
    for name in ("unfinished-slot-7.fragment", "unfinished-slot-8.record", "slot-9.record"):
        (path / name).write_bytes(b"half")
    shutil.copytree(path, path.with_name("0.1"))
    return path


@pytest.mark.parametrize("choice", [["--job", "job"], ["--all"]])
def test_clean_removes_all_that_a_killed_process_left(children, arena_dir, capsys, choice):
    """Arena, half-made files, sibling and the directories above them: nothing is left."""
    path = leave_behind(children, arena_dir)
    code, out, _ = run(capsys, "clean", "--arena-dir", arena_dir, *choice)
    assert (code, out.split()) == (0, [str(path), f"{path}.1"])
    assert list(arena_dir.iterdir()) == []


def test_the_next_start_removes_what_nobody_will_use(children, open_arena, arena_dir, capsys):
    """The same job starts again: half-made files and the older sibling go, slots are adopted."""
    path = leave_behind(children, arena_dir)
    arena = open_arena()
    assert arena.path == f"{path}.1"
    assert not path.exists()
    assert sorted(arena.slots) == [0, 1]
    expected = {"lock", "head", "slot-0.safetensors", "slot-1.fragment"}
    expected |= {"slot-0.record", "slot-1.record"}
    assert {file.name for file in Path(arena.path).iterdir()} == expected
    assert run(capsys, "verify", "--arena-dir", arena_dir)[0] == 0


# --- the command line itself


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["--nonsense"],
        ["status", "--nonsense"],
        ["status", "extra"],
        ["status", "--job"],
        ["clean", "--nonsense"],
        ["verify", "--all"],
        ["clean", "--dry-run=yes"],
    ],
)
def test_a_wrong_command_line_exits_2(argv, capsys):
    """Usage goes to standard error, with what was wrong; standard output stays empty."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert "usage: planaria" in err


@pytest.mark.parametrize("argv", [["--help"], *([c, "--help"] for c in COMMANDS)])
def test_help_exits_0(argv, capsys):
    """Help names the commands, or the command's options, on standard output."""
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert "--arena-dir" in out or all(word in out for word in (*COMMANDS, "demo"))


@pytest.fixture
def added(monkeypatch):
    """Install a made-up distribution that adds a command; return the command lines it is given."""
    calls, module = [], types.ModuleType("made_up_commands")

    def command(argv):
        calls.append(list(argv))
        if argv == ["fail"]:
            raise ConfigError("it cannot be done")
        return 7

    module.run, module.status = command, command
    monkeypatch.setitem(sys.modules, "made_up_commands", module)
    points = [
        EntryPoint("soak", "made_up_commands:run", cli.COMMANDS_GROUP),
        EntryPoint("status", "made_up_commands:status", cli.COMMANDS_GROUP),
        EntryPoint("broken", "no_such_module:run", cli.COMMANDS_GROUP),
    ]
    monkeypatch.setattr(
        cli, "entry_points", lambda group: points if group == cli.COMMANDS_GROUP else []
    )
    return calls


def test_other_distributions_add_commands(added, capsys):
    """The entry point gets the rest of the line, its exit code is ours, its errors are one line."""
    assert run(capsys, "soak", "--seed", "3") == (7, "", "")
    assert run(capsys, "soak", "fail") == (1, "", "planaria: it cannot be done\n")
    assert added == [["--seed", "3"], ["fail"]]


def test_added_commands_are_listed_but_not_loaded_and_replace_none(added, arena_dir, capsys):
    """Help lists them without importing a broken one; our own commands cannot be taken over."""
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "soak" in out
    assert "broken" in out
    assert status(capsys, arena_dir)["arenas"] == []
    assert added == []


def test_the_demo_gets_the_rest_of_the_line_and_decides_the_exit_code(monkeypatch, capsys):
    """``planaria demo ...`` hands over to the demo's main, which is imported only then."""
    seen, module = [], types.ModuleType("replica.demo.cluster")
    module.main = lambda argv: seen.append(argv) or 3
    monkeypatch.setitem(sys.modules, "replica.demo.cluster", module)
    assert run(capsys, "demo", "--nodes", "5", "--help")[0] == 3
    assert seen == [["--nodes", "5", "--help"]]


def test_the_command_runs_as_a_process(open_arena, arena_dir):
    """From a shell: one JSON object on standard output, exit code 0 as the process's own."""
    open_arena()
    shown = subprocess.run(
        [*PROGRAM, "status", "--json", "--arena-dir", arena_dir],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert len(json.loads(shown.stdout)["arenas"]) == 1


def test_commands_that_look_at_arenas_do_not_load_torch(open_arena, arena_dir):
    """Each command is run in a fresh interpreter over an arena with a slot: torch stays out."""
    open_arena().allocate(500, "held").write_record(record())
    program = f"""
{LAUNCH}
codes = [main([word, "--arena-dir", {str(arena_dir)!r}]) for word in {COMMANDS!r}]
print(codes, "torch" in sys.modules, file=sys.stderr)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.stderr == "[0, 0, 0] False\n"


@pytest.mark.parametrize("argv", [["status"], ["status", "--json"], ["verify"]])
def test_a_reader_that_leaves_gets_no_traceback(open_arena, arena_dir, argv):
    """Standard output is a pipe that nobody reads any more, as after ``| head``: not a word."""
    open_arena()
    reader, writer = os.pipe()
    os.close(reader)
    command = [*PROGRAM, *argv, "--arena-dir", arena_dir]
    try:
        ran = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (cli.READER_GONE, b"")


def test_an_interrupted_command_says_so_by_its_code(added, monkeypatch, capsys):
    """Ctrl-C while a command runs: no traceback, exit code 130."""

    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "made_up_commands", types.SimpleNamespace(run=interrupted))
    assert run(capsys, "soak") == (cli.INTERRUPTED, "", "")
