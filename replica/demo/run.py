"""The run itself: start nodes, wait, kill, replace, go on, then train again uninterrupted."""

from __future__ import annotations

import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from replica.demo.compare import Outcome, compare, outcome
from replica.demo.journal import Line
from replica.demo.nodes import (
    Node,
    Place,
    make_place,
    remove_arena,
    start_node,
    start_reference_worker,
    start_store,
)
from replica.demo.options import DemoOptions, KillPlan, draw_kill
from replica.demo.report import Kill, Report, make_report
from replica.demo.story import Story, kill_sentence, noticed_sentence
from replica.demo.trees import kill_trees, processes_of, sweep
from replica.demo.watch import DemoError, Watch, final_ranks, steps_done

STORE_START_TIMEOUT_S = 60.0
STORE_EXIT_TIMEOUT_S = 30.0
PROGRESS_LINES = 8


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What a demo gives: its figures, and both runs for the picture."""

    report: Report
    run: Outcome
    reference: Outcome


def run_demo(options: DemoOptions, place: Place, story: Story) -> DemoResult:
    """Carry the whole demo through.

    Raises:
        DemoError: the demo could not be carried through: a process failed or nothing moved on.
    """
    with running_store(place) as store:
        cluster = Cluster(options, place, store, story)
        kill = cluster.train()
        reference_lines = train_uninterrupted(options, place, store, story)
    run, reference = outcome(cluster.watch.lines), outcome(reference_lines)
    try:
        report = make_report(
            cluster.watch.lines,
            kill,
            compare(run, reference, world=options.nodes, steps=options.steps),
            nodes=options.nodes,
            redundancy=str(options.layout),
            steps=options.steps,
            seed=options.seed,
        )
    except (KeyError, ValueError) as error:
        raise DemoError(f"the journals do not tell what happened: {error!r}") from error
    return DemoResult(report=report, run=run, reference=reference)


@contextmanager
def clean_place() -> Iterator[Place]:
    """Make a run's directories; afterwards end its processes and remove its arenas, always.

    The work directory stays; who knows that all went well removes it.

    Raises:
        DemoError: no directory can be made on tmpfs.
    """
    try:
        place = make_place()
    except OSError as error:
        raise DemoError(f"no directory for the arenas: {error}") from error
    try:
        yield place
    finally:
        sweep(place.run_id)
        shutil.rmtree(place.arenas_dir, ignore_errors=True)


@contextmanager
def running_store(place: Place) -> Iterator[str]:
    """Start the store process and give its host:port; ended afterwards."""
    process = start_store(place)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], STORE_START_TIMEOUT_S)
        port = process.stdout.readline().strip() if ready else b""
        if not port:
            raise DemoError(f"the store process did not start: see {place.log_path('store')}")
        yield f"127.0.0.1:{int(port)}"
    finally:
        # The end of its input tells it to clear up and end.
        process.stdin.close()
        process.stdout.close()
        _wait_or_kill(process)


class Cluster:
    """The nodes of the run that loses some of them."""

    def __init__(self, options: DemoOptions, place: Place, store: str, story: Story) -> None:
        self._options = options
        self._place = place
        self._store = store
        self._story = story
        self._nodes: list[Node] = []
        self._started = 0
        self._progress = Progress(story, options.steps)
        self.watch = Watch(place.journal_dir("training"), self._progress.take)

    def train(self) -> Kill:
        """Train to the end with one kill on the way; return what was killed."""
        plan = draw_kill(self._options)
        self._story.say(
            "starting the nodes: each a torchrun agent with an arena directory of its own"
        )
        self._nodes = [self._start_node() for _ in range(self._options.nodes)]
        self.watch.until(lambda: self._steps() >= plan.step, what=f"step {plan.step}")
        time.sleep(plan.fraction * self.watch.step_seconds())
        kill = self._kill(plan)
        self.watch.until(self._finished, what="the end of training")
        self.watch.wait_for_exits()
        return kill

    def _start_node(self) -> Node:
        name = f"node-{self._started}"
        self._started += 1
        options = self._options
        train = [*_train_arguments(options, self._place, "training"), "--guard-arenas"]
        train += ["--redundancy", options.redundancy, *(["--sabotage"] * options.sabotage)]
        node = start_node(self._place, name, nodes=options.nodes, store=self._store, train=train)
        self.watch.expect(name, node.agent)
        return node

    def _kill(self, plan: KillPlan) -> Kill:
        victims = [self._nodes[index] for index in plan.victims]
        if self._options.kill_process:
            at_s, killed = self._kill_workers(victims)
        else:
            at_s, killed = self._kill_nodes(victims)
        freed = 0 if self._options.kill_process else sum(remove_arena(node) for node in victims)
        if len(killed) < len(victims):
            raise DemoError(f"a victim had died by itself before the kill: {victims}")
        kill = Kill(
            at_s=at_s,
            nodes=tuple(node.name for node in victims),
            ranks=tuple(self._rank_of(node.name) for node in victims),
            processes=len(killed),
            arena_bytes=freed,
        )
        self._story.say(kill_sentence(kill, step=plan.step, kept_node=self._options.kill_process))
        if not self._options.kill_process:
            replacements = [self._start_node() for _ in victims]
            names = ", ".join(node.name for node in replacements)
            self._story.say(f"started in place of the dead, empty: {names}")
        return kill

    def _kill_nodes(self, victims: Sequence[Node]) -> tuple[float, list[int]]:
        for node in victims:
            self.watch.forget(node.name)
        at_s, killed = kill_trees([node.agent.pid for node in victims])
        for node in victims:
            node.agent.wait()
            # A process born while the tree was being listed.
            sweep(self._place.run_id, node=node.name)
        return at_s, killed

    def _kill_workers(self, victims: Sequence[Node]) -> tuple[float, list[int]]:
        agents = {node.agent.pid for node in victims}
        workers = [
            process.pid
            for node in victims
            for process in processes_of(self._place.run_id, node=node.name)
            if process.pid not in agents
        ]
        return kill_trees(workers)

    def _rank_of(self, node: str) -> int:
        ranks = [
            line.rank for line in self.watch.lines if line.node == node and line.rank is not None
        ]
        if not ranks:
            raise DemoError(f"{node} never joined the job")
        return ranks[-1]

    def _steps(self) -> int:
        return steps_done(self.watch.lines)

    def _finished(self) -> bool:
        return len(final_ranks(self.watch.lines)) == self._options.nodes


class Progress:
    """Tells the story of a run's lines: who joined, how far training is, who noticed a death."""

    def __init__(self, story: Story, steps: int) -> None:
        self._story = story
        self._steps = steps
        self._every = max(1, steps // PROGRESS_LINES)
        self._told: set[tuple[object, ...]] = set()

    def take(self, line: Line) -> None:
        """Tell what is worth telling about one line."""
        if line.event == "start" and line.rank == 0:
            self._once(
                ("start", line.round_id),
                lambda: f"{line.world} workers train; rank 0 is on {line.node}",
            )
        elif line.event == "interrupted":
            self._once(
                ("interrupted", line.round_id),
                lambda: noticed_sentence(line.node, line.facts["error"]),
            )
        elif line.event == "sabotage":
            self._story.say(f"sabotage: one restored byte flipped on {line.node}")
        elif line.event == "step" and line.rank == 0 and line.facts["step"] % self._every == 0:
            self._story.say(
                f"step {line.facts['step']}/{self._steps}, loss {line.facts['loss']:.3f}"
            )

    def _once(self, key: tuple[object, ...], text: Callable[[], str]) -> None:
        if key not in self._told:
            self._told.add(key)
            self._story.say(text())


def train_uninterrupted(options: DemoOptions, place: Place, store: str, story: Story) -> list[Line]:
    """Train the same without checkpointer and without a kill; return the workers' lines."""
    story.say("the same training once more, uninterrupted and without the checkpointer")
    watch = Watch(place.journal_dir("reference"), Progress(story, options.steps).take)
    train = [*_train_arguments(options, place, "reference"), "--no-checkpoint"]
    for rank in range(options.nodes):
        process = start_reference_worker(
            place, rank=rank, world=options.nodes, store=store, train=train
        )
        watch.expect(f"reference-{rank}", process)
    watch.until(
        lambda: len(final_ranks(watch.lines)) == options.nodes,
        what="the end of the uninterrupted run",
    )
    watch.wait_for_exits()
    return watch.lines


def _train_arguments(options: DemoOptions, place: Place, run: str) -> list[str]:
    return [
        *("--steps", str(options.steps), "--seed", str(options.seed), "--device", "cpu"),
        *("--journal-dir", str(place.journal_dir(run))),
    ]


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STORE_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
