"""The command ``planaria demo``: options in; story, figures, picture and exit code out."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from replica.demo.nodes import Place
from replica.demo.options import DemoOptions, parse_demo_options
from replica.demo.plot import draw
from replica.demo.run import DemoResult, clean_place, run_demo
from replica.demo.story import (
    DIFFERENT,
    FAILED,
    USAGE,
    Story,
    exit_code,
    opening,
    resumed_sentence,
    table,
    verdict,
)
from replica.demo.watch import DemoError

PICTURE = Path("demo.png")
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; return its exit code.

    0 equal, 1 different, 3 beyond the layout and said so, 4 the demo failed and shows nothing, 130
    interrupted. Usage errors end with 2 before anything is started.
    """
    options = parse_demo_options(arguments)
    if options.json not in {None, "-"} and not Path(options.json).parent.is_dir():
        print(f"planaria demo: no directory for --json {options.json}", file=sys.stderr)
        return USAGE
    story = Story(sys.stderr if options.json == "-" else sys.stdout)
    story.say(opening(options))
    try:
        with terminable(), clean_place() as place:
            return _run(options, place, story)
    except DemoError as error:
        story.say(f"the demo could not begin: {error}")
        return FAILED
    except KeyboardInterrupt:
        story.say("interrupted; every process ended, every arena removed")
        return INTERRUPTED


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C, so that what was started is cleared up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(options: DemoOptions, place: Place, story: Story) -> int:
    try:
        result = run_demo(options, place, story)
    except DemoError as error:
        story.say(f"the demo failed: {error}")
        story.show(_log_tails(place))
        story.say(f"logs and journals kept in {place.work_dir}")
        return FAILED
    except KeyboardInterrupt:
        shutil.rmtree(place.work_dir)
        raise
    code = _tell(options, result, story)
    # A difference that was asked for leaves nothing to look into.
    if code != DIFFERENT or options.sabotage:
        shutil.rmtree(place.work_dir)
    else:
        story.say(f"logs and journals kept in {place.work_dir}")
    return code


def _tell(options: DemoOptions, result: DemoResult, story: Story) -> int:
    report = result.report
    story.say(resumed_sentence(report))
    story.show(table(report))
    story.say(_draw(result))
    _write_json(options, report.to_json())
    story.say(verdict(report, options))
    return exit_code(report, options)


def _draw(result: DemoResult) -> str:
    try:
        drawn = draw(PICTURE, result.run, result.reference, result.report)
    except OSError as error:
        return f"no {PICTURE}: {error}"
    return f"picture: {PICTURE}" if drawn else f"no {PICTURE}: matplotlib is not installed"


def _write_json(options: DemoOptions, figures: dict[str, object]) -> None:
    text = json.dumps(figures, indent=2) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    elif options.json is not None:
        Path(options.json).write_text(text)


def _log_tails(place: Place, count: int = 8) -> str:
    """Return the last lines of every log, which name what went wrong."""
    parts = []
    for path in sorted(place.work_dir.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-count:]
        parts.append("\n".join([f"--- {path.name}", *lines]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
