"""What a learner can learn from a recording: its Steps, and whose they are."""

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
    """The files of each recording: parts that one recorder wrote belong together, in whatever order they are named.

    Each part begins with a copy of what was said in those before it, with the time at which that was published.

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
    """The robot of a recording, of one file or several parts, and its Steps in the order in which each source published
    them.

    Raises:
        SessionError: a file is damaged, or does not say which robot it is of.
    """
    return of(Session(parts))


def of(session: Session) -> tuple[RobotSpec, Iterator[Step]]:
    """As :func:`read`, of a recording that is open.

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
    """Whether a recording can be learned from by this robot.

    Raises:
        SessionError: as :func:`read`, or it is another robot's.
    """
    recorded, _ = read(path)
    if difference := spec.difference(recorded):
        raise SessionError(f"{str(path)!r} is of another robot: {difference}")
