"""Reads Steps and the robot specification from recordings, for a learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from td3_robot.errors import ConfigError, SessionError
from td3_robot.messages import Step
from td3_robot.recording.entries import REPEATED
from td3_robot.recording.reader import Session
from td3_robot.recording.session_file import SessionFile
from td3_robot.specs import RobotSpec


def recordings(files: Sequence[Path]) -> list[list[Path]]:
    """Group files by recording. A group holds the parts that one recorder wrote.

    The files may be in any order, and so may the parts in a group.

    Each part repeats messages of the previous part. These messages show which parts belong together.

    Raises:
        SessionError: a file cannot be read.
    """
    found: list[tuple[list[Path], set[object]]] = []
    for file in files:
        entries = SessionFile(file).entries() if len(files) > 1 else ()
        repeated: set[object] = {(it.identity, it.published) for it in entries if it.topic in REPEATED}
        parts = [file]
        for known in [known for known in found if known[1] & repeated]:
            found.remove(known)
            parts, repeated = [*known[0], *parts], known[1] | repeated
        found.append((parts, repeated))
    return [parts for parts, _ in found]


def read(*parts: Path) -> tuple[RobotSpec, Iterator[Step]]:
    """The robot specification and the Steps of a recording. The Steps of each source are in order."""
    session = Session(parts)
    return spec_of(session), (step for _, step in session.messages_of(Step))


def spec_of(session: Session) -> RobotSpec:
    """The specification of the robots in a recording.

    Raises:
        SessionError: a file is damaged, no Hello of a robot is recorded, or there are two kinds of robots.
    """
    label, spec = session.decode.label, None
    for _, hello in session.robots():
        try:
            another = RobotSpec.from_description(hello.spec)
        except ConfigError as error:
            raise SessionError(f"{label}: {error}") from None
        if spec and (difference := spec.difference(another)):
            raise SessionError(f"{label} holds two kinds of robots: {difference}")
        spec = another
    if spec is None:
        raise SessionError(f"{label} does not describe its robot: it holds no Hello of a robot")
    return spec


def check(path: Path, spec: RobotSpec) -> None:
    """Raise a SessionError if the robot in the recording does not fit ``spec``."""
    if difference := spec.difference(spec_of(Session([path]))):
        raise SessionError(f"{str(path)!r} is of another robot: {difference}")
