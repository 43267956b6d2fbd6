"""Reads Steps and the robot specification from recordings, for a learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from td3_robot.core_types import ROBOT_ROLES
from td3_robot.errors import ConfigError, SessionError
from td3_robot.messages import Hello, Step
from td3_robot.recording.entries import REPEATED, Entry
from td3_robot.recording.reader import Session, SessionFile
from td3_robot.specs import RobotSpec


def recordings(files: Sequence[Path]) -> list[list[Path]]:
    """Group files by recording: the parts that one recorder wrote form a group. Files may be in any order.

    Parts are recognised by repeated messages: each part repeats messages of the part before it.

    Raises:
        SessionError: a file cannot be read.
    """
    found: list[tuple[list[Path], set[object]]] = []
    for file in files:
        said: set[object] = {
            (item.identity, item.published)
            for item in (SessionFile(file).items() if len(files) > 1 else ())
            if isinstance(item, Entry) and item.topic in REPEATED
        }
        parts = [file]
        for known in [known for known in found if known[1] & said]:
            found.remove(known)
            parts, said = [*known[0], *parts], known[1] | said
        found.append((parts, said))
    return [parts for parts, _ in found]


def read(*parts: Path) -> tuple[RobotSpec, Iterator[Step]]:
    """The robot specification and the Steps of a recording. The Steps of each source are in order.

    Args:
        parts: one file, or all parts of one recording.

    Raises:
        SessionError: a file is damaged, there is no Hello of a robot, or there are two kinds of robots.
    """
    return of(Session(parts))


def of(session: Session) -> tuple[RobotSpec, Iterator[Step]]:
    """Like :func:`read`, for an open recording.

    Raises:
        SessionError: as :func:`read`.
    """
    label, spec = session.decode.label, None
    for _, message in session.messages((Hello.NAME,)):
        if isinstance(message, Hello) and message.role in ROBOT_ROLES:
            try:
                mine = RobotSpec.from_description(message.spec)
            except ConfigError as error:
                raise SessionError(f"{label}: {error}") from None
            if spec and (difference := spec.difference(mine)):
                raise SessionError(f"{label} holds two kinds of robots: {difference}")
            spec = mine
    if spec is None:
        raise SessionError(f"{label} does not say which robot it is of: there is no Hello in it")
    return spec, (message for _, message in session.messages((Step.NAME,)) if isinstance(message, Step))


def check(path: Path, spec: RobotSpec) -> None:
    """Check that a recording is of this robot.

    Raises:
        SessionError: as :func:`read`, or the recording is of another robot.
    """
    recorded, _ = read(path)
    if difference := spec.difference(recorded):
        raise SessionError(f"{str(path)!r} is of another robot: {difference}")
