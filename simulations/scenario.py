"""A run as a small text file, which a person can read and change; parsed strictly.

::

    # A comment: the story that is played.
    redundancy stripe:2+1
    nodes 4
    fault kill-process rank=2 on=save.await-decision nth=3 after=0.01
    fault kill-node node=1 after=0.5
    expect verdict pass
    expect restores >= 2
    expect fired kill-node >= 1

A line sets one value of ``config.Config``, adds a fault, or says what has to come of it: a verdict,
a count of the report (its words joined by dashes), or how often a kind of fault came. A fault
comes never before the one above it. ``on``: "phase.word" of an action that a thread is about to
take, "*" for any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from simulations.afflictions import AFFLICTIONS
from simulations.config import Config, Fault
from simulations.runs import BEYOND, PASS, Result


class ScenarioError(ValueError):
    """A scenario's text is not what it should be."""


@dataclass(frozen=True)
class Expectation:
    """What has to come of a run."""

    what: tuple[str, ...]
    least: int = 0

    def failure(self, result: Result) -> str:
        """What came instead; "" when it is as expected."""
        words = " ".join(self.what)
        if self.what[0] == "verdict":
            return "" if result.verdict == self.what[1] else f"verdict {result.verdict}"
        if self.what[0] in ("fired", "failures"):
            kinds = result.fired if self.what[0] == "fired" else result.failures
            count = kinds[self.what[1]] if len(self.what) == 2 else sum(kinds.values())
        else:
            count = result.counts[words.replace("-", " ")]
        return "" if count >= self.least else f"{words} {count}, expected {self.least} or more"


@dataclass(frozen=True)
class Scenario:
    """A run, the story told above it, and what is expected."""

    config: Config
    expectations: tuple[Expectation, ...] = ()
    story: tuple[str, ...] = ()

    def failures(self, result: Result) -> list[str]:
        """What is not as expected; without a word on it the verdict has to be a good one."""
        found = [expectation.failure(result) for expectation in self.expectations]
        if not any(expectation.what[0] == "verdict" for expectation in self.expectations):
            found.append("" if result.verdict in (PASS, BEYOND) else f"verdict {result.verdict}")
        return [text for text in found if text]


def parse(text: str) -> Scenario:
    """The scenario in ``text``; ScenarioError names the line."""
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    expectations: list[Expectation] = []
    story: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("#"):
            story.append(line[1:].strip())
        if not line or line.startswith("#"):
            continue
        try:
            word, *rest = line.split()
            if word == "fault":
                faults.append(_fault(rest))
            elif word == "expect":
                expectations.append(_expectation(rest))
            else:
                name = word.replace("-", "_")
                if name in values:
                    raise ScenarioError(f"{word} stands there twice")
                values[name] = _value(Config, name, rest)
        except (ValueError, IndexError, KeyError) as error:
            raise ScenarioError(f"line {number}: {line!r}: {error}") from error
    if "seed" not in values:
        raise ScenarioError("a scenario needs a line with its seed")
    return Scenario(Config(**values, faults=tuple(faults)), tuple(expectations), tuple(story))


def write(scenario: Scenario) -> str:
    """The text that ``parse`` reads."""
    lines = [f"# {line}".rstrip() for line in scenario.story]
    default = Config(seed=-1)
    for field in fields(Config):
        value = getattr(scenario.config, field.name)
        if field.name != "faults" and value != getattr(default, field.name):
            lines.append(f"{field.name.replace('_', '-')} {_text(value)}")
    lines += [f"fault {' '.join(_fault_words(fault))}" for fault in scenario.config.faults]
    for expectation in scenario.expectations:
        tail = "" if expectation.what[0] == "verdict" else f" >= {expectation.least}"
        lines.append(f"expect {' '.join(expectation.what)}{tail}")
    return "\n".join(lines) + "\n"


_NAMES = {"for": "for_s", "after": "after_s", "at": "at_s", "by": "by_s", "by-rank": "by_rank"}


def _fault(words: list[str]) -> Fault:
    kind, *rest = words
    if kind not in AFFLICTIONS:
        raise ScenarioError(f"no such fault; there are {', '.join(AFFLICTIONS)}")
    values: dict[str, Any] = {}
    for word in rest:
        name, equals, value = word.partition("=")
        if not equals:
            raise ScenarioError(f"expected name=value, got {word!r}")
        name = _NAMES.get(name, name)
        if name in values or name == "kind":
            raise ScenarioError(f"{word!r} cannot stand here, or not twice")
        values[name] = _value(Fault, name, [value])
    return Fault(kind=kind, **values)


def _fault_words(fault: Fault) -> list[str]:
    back = {field: name for name, field in _NAMES.items()}
    default = Fault(kind="")
    return [fault.kind] + [
        f"{back.get(field.name, field.name)}={_text(getattr(fault, field.name))}"
        for field in fields(Fault)
        if field.name != "kind" and getattr(fault, field.name) != getattr(default, field.name)
    ]


def _expectation(words: list[str]) -> Expectation:
    if words[0] == "verdict" and len(words) == 2:
        return Expectation(tuple(words))
    *what, sign, least = words
    if not what or sign != ">=" or len(what) > 2:
        raise ScenarioError("expected a verdict, or a count, >= and a number")
    return Expectation(tuple(what), int(least))


def _value(kind: type, name: str, words: list[str]) -> Any:
    known = {field.name: str(field.type) for field in fields(kind)}
    if name not in known or name == "faults":
        raise ScenarioError(f"no such setting; there are {', '.join(sorted(known))}")
    if known[name].startswith("tuple"):
        return tuple(int(word) for word in words)
    (word,) = words
    return _parser(known[name])(word)


def _parser(kind: str) -> Callable[[str], Any]:
    if kind == "bool":
        return lambda word: {"yes": True, "no": False}[word]
    if kind.startswith("float"):
        return float
    return int if kind.startswith("int") else str


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)
