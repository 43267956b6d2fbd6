"""Compares recorded messages with replayed messages, field by field.

Messages with the same key, for example the same version, form a pair. On the same kind of machine, all bits of an
array must be equal. On another machine, the numbers of an array may differ by the tolerance of their field in
``messages.py``. All other values (flags, versions, identities) must always be equal.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from td3_robot.messages import (
    Action,
    Command,
    FieldType,
    LifecycleChange,
    Message,
    MotorCommand,
    Reply,
    SimulatorState,
    Step,
    Throttle,
    Weights,
    wire_fields,
)

KEYS: dict[str, tuple[str, ...]] = {
    Step.NAME: ("source", "incarnation", "sequence"),
    Action.NAME: ("source", "incarnation", "answers"),
    Throttle.NAME: ("source", "incarnation", "answers"),
    Weights.NAME: ("version",),
    LifecycleChange.NAME: ("node",),
    Reply.NAME: ("id", "node"),
    Command.NAME: ("id", "target", "verb"),
    MotorCommand.NAME: ("step",),
    SimulatorState.NAME: ("source", "incarnation", "answers"),
}
"""The fields that form the key of a message, by topic. Messages of other topics form pairs by position."""
_SHOWN = 10  # number of differences to keep; further differences are only counted
_AXES = {"N": "robot", "O": "channel", "A": "channel", "E": "episode"}
_WIDTH, _HEIGHT = 60, 5

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Difference:
    """One difference, as text.

    Attributes:
        message: the key of the message and, if known, the Step at which the node sent it.
        field: name of the field and place in it; or ``missing``, ``not expected``, ``order``.
    """

    message: str
    field: str
    expected: str
    got: str


@dataclass
class Comparison:
    """The result of comparing two sequences of messages of one topic.

    Attributes:
        compared: number of pairs of messages.
        first: the first differences that were found. In each stream, differences in the order of messages come before
            all other differences.
        counts: maps the name of a field to the number of messages in which the field differs. The keys ``missing``,
            ``not expected`` and ``order`` hold the number of messages that are missing, not expected or out of order.
        places: maps the key of each message to the Step at which the node sent the message. ``places`` is empty for
            Steps.
        errors: maps the name of a field to a list with one number per pair of messages: the largest error of the field
            in this pair. Fields that never differ are left out. The number is 0 if the field does not differ in this
            pair. If the field differs, the number is infinite in three cases: the field is not an array, the shapes
            differ, or a value that differs is not finite.
    """

    topic: str
    compared: int = 0
    first: list[Difference] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    errors: dict[str, list[float]] = field(default_factory=dict)
    places: dict[Key, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        return not self.counts

    def note(self, kind: str, key: Key, where: str, expected: str, got: str) -> None:
        self.counts[kind] += 1
        if len(self.first) < _SHOWN:
            message, place = _text(key), self.places.get(key)
            self.first.append(Difference(f"{message} at {place}" if place else message, where, expected, got))

    def add(self, other: Comparison) -> None:
        """Append the comparison of another stream of this topic."""
        for name in {**self.errors, **other.errors}:
            self.errors.setdefault(name, [0.0] * self.compared)
            self.errors[name] += other.errors.get(name, [0.0] * other.compared)
        self.compared += other.compared
        self.counts += other.counts
        self.first = [*self.first, *other.first][:_SHOWN]

    def worst(self) -> str | None:
        """The field with the largest error; None if no field of the compared messages differs."""
        return max(self.errors, key=lambda name: (max(self.errors[name]), name), default=None)


def compare(
    topic: str,
    expected: Sequence[Message],
    got: Sequence[Message],
    *,
    exact: bool,
    where: Mapping[int, str] | None = None,
) -> Comparison:
    """Compare messages of one topic.

    Args:
        exact: True requires equal bits. False allows numbers of arrays to differ by the tolerance of their field.
        where: maps Python's ``id`` of a message to the Step at which the node sent the message. Only the texts of the
            differences use ``where``.
    """
    ours, theirs = _keyed(topic, got), _keyed(topic, expected)
    result = Comparison(topic)
    places = {key: (where or {}).get(id(message), "") for key, message in {**ours, **theirs}.items()}
    result.places = places if topic != Step.NAME else {}
    _compare_order(result, list(theirs), list(ours))
    errors: dict[str, list[float]] = {}
    for key, message in theirs.items():
        if key not in ours:
            result.note("missing", key, "missing", "a message", "none")
            continue
        for name, wire in wire_fields(type(message)).items():
            error = _compare_field(result, key, name, wire, getattr(message, name), getattr(ours[key], name), exact)
            errors.setdefault(name, []).append(error)
        result.compared += 1
    for key in ours:
        if key not in theirs:
            result.note("not expected", key, "not expected", "none", "a message")
    result.errors = {name: errors[name] for name in errors if name in result.counts}
    return result


def _keyed(topic: str, messages: Sequence[Message]) -> dict[Key, Message]:
    """The messages by key. If several messages have the same key, a number makes their keys different."""
    names, times = KEYS.get(topic, ()), Counter[Key]()
    keyed: dict[Key, Message] = {}
    for message in messages:
        key = tuple(getattr(message, name) for name in names)
        times[key] += 1
        repeated = (f"no. {times[key]}",) if times[key] > 1 or not names else ()
        keyed[key + repeated] = message
    return keyed


def _text(key: Key) -> str:
    return " ".join(str(part) for part in key)


def _compare_order(result: Comparison, expected: list[Key], got: list[Key]) -> None:
    here, there = set(got), set(expected)
    both = [key for key in expected if key in here]
    for theirs, ours in zip(both, (key for key in got if key in there), strict=True):
        if theirs != ours:
            result.note("order", theirs, "order", _text(theirs), _text(ours))


def _compare_field(
    result: Comparison, key: Key, name: str, wire: FieldType, expected: Any, got: Any, exact: bool
) -> float:
    """Compare a field, and note a difference. Returns the largest error; 0 without a difference."""
    if wire.kind != "array":
        if type(expected) is type(got) and _same(expected, got):
            return 0.0
        where, expected, got = _within(expected, got)
        result.note(name, key, f"{name}{where}", _short(expected), _short(got))
        return float("inf")
    if expected.shape != got.shape:
        result.note(name, key, f"{name}, its shape", str(list(expected.shape)), str(list(got.shape)))
        return float("inf")
    wrong = _differing(expected, got, 0.0 if exact else wire.tolerance, exact)
    if not wrong.any():
        return 0.0
    place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    where = ", ".join(f"{_AXES.get(axis, axis)} {index}" for axis, index in zip(wire.shape, place, strict=True))
    others = int(wrong.sum()) - 1
    more = f" and {others} more" if others else ""
    result.note(name, key, f"{name}[{where}]{more}", repr(expected[place].item()), repr(got[place].item()))
    error = np.abs(got[wrong].astype(np.float64) - expected[wrong].astype(np.float64))
    # The error must not be 0, even if only the sign of a zero differs.
    return float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max()) or 5e-324


def _same(expected: Any, got: Any) -> bool:
    """Whether two values are equal. NaN equals NaN, also inside maps and lists."""
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(_same(expected[name], got[name]) for name in expected)
    if isinstance(expected, list) and isinstance(got, list):
        return len(expected) == len(got) and all(map(_same, expected, got))
    return bool(expected == got or (expected != expected and got != got))


def _within(expected: Any, got: Any) -> tuple[str, Any, Any]:
    """The place of the first difference in two maps, as text, and the values there."""
    where = ""
    while isinstance(expected, dict) and isinstance(got, dict) and expected.keys() == got.keys():
        name = next(name for name in expected if not _same(expected[name], got[name]))
        where, expected, got = f"{where}[{name}]", expected[name], got[name]
    return where, expected, got


def _differing(expected: NDArray[Any], got: NDArray[Any], tolerance: float, exact: bool) -> NDArray[np.bool_]:
    """bool array of the same shape: True where the arrays differ.

    If ``exact``, all bits must be equal. Otherwise, floats may differ by ``tolerance``, and two NaNs are equal.
    """
    if exact or expected.dtype.kind != "f":
        unsigned = f"u{expected.dtype.itemsize}"
        before, now = (np.ascontiguousarray(array).view(unsigned) for array in (expected, got))
        bits: NDArray[np.bool_] = before != now
        return bits
    both_nan = np.isnan(expected) & np.isnan(got)
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.isfinite(expected) & (np.abs(got - expected) <= tolerance + tolerance * np.abs(expected))
    differing: NDArray[np.bool_] = ~(near | (expected == got) | both_nan)
    return differing


def _short(value: Any) -> str:
    text = value[:20].hex() + f"… ({len(value)} bytes)" if isinstance(value, bytes) and len(value) > 20 else repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def plot(errors: Sequence[float]) -> list[str]:
    """A plot of the error (vertical) over the messages (horizontal); infinite errors touch the top."""
    finite = [error for error in errors if np.isfinite(error)]
    top = max(finite, default=0.0) or 1.0
    columns = min(_WIDTH, len(errors))
    edges = np.linspace(0, len(errors), columns + 1).astype(int)
    peaks = [max(errors[a:b]) for a, b in itertools.pairwise(edges.tolist())]
    heights = [_HEIGHT if not np.isfinite(peak) else int(np.ceil(peak / top * _HEIGHT)) for peak in peaks]
    lines = []
    for level in range(_HEIGHT, 0, -1):
        label = f"{top * level / _HEIGHT:9.2g}"
        lines.append(f"{label} │" + "".join("█" if height >= level else " " for height in heights))
    lines.append(f"{'0':>9} └" + "─" * columns)
    lines.append(f"{'':11}first{'':{max(1, columns - 9)}}last" if columns >= 10 else "")
    return lines
