"""Reads recordings in Python: as messages, arrays, transitions and data frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from td3_robot.messages import Message, Phase, Step, wire_fields
from td3_robot.specs import Float32, RobotSpec
from td3_robot.util import arguments, extras

if TYPE_CHECKING:
    import pandas

    from td3_robot.recording.reader import Session


_SCALARS = {"u32": "uint32", "u64": "uint64", "i64": "int64", "f64": "float64"}
"""Kinds of fields that hold one number, and their dtypes."""


@dataclass(frozen=True, eq=False)
class Transitions:
    """All transitions of a recording, episode after episode: M rows for training or analysis.

    O and A are the numbers of observation and action channels.

    Attributes:
        observation: float32[M, O], before the action, in the units of the robot's observations.
        action: float32[M, A], the applied action, in the units of the robot's actions.
        reward: float32[M].
        next_observation: float32[M, O], after the action.
        terminated: bool[M], whether the transition ended its episode in a terminal state.
        truncated: bool[M], whether a time limit, a fault or an operator ended the episode after the transition.
        episode: int64[M], number of the episode in this recording, from 0. A gap in the recording starts a new number.
    """

    observation: Float32
    action: Float32
    reward: Float32
    next_observation: Float32
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    episode: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.reward)


class Recording:
    """A recording of a training run or a robot. :func:`open_recording` returns it.

    In :meth:`arrays` and :meth:`to_pandas`, a message gives one row for each of its robots. An Evaluation gives one row
    for each episode, and a MotorCommand one row for each channel. A message without arrays gives one row.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<Recording {', '.join(map(str, self._session.paths))}: {self.duration_s:.1f} s>"

    @property
    def duration_s(self) -> float:
        """Seconds from the first message to the last."""
        return (self._session.end - self._session.begin) * 1e-9

    @cached_property
    def topics(self) -> dict[str, int]:
        """Number of messages of each topic."""
        counts: Counter[str] = Counter()
        for (_, _, topic), count in self._session.counts.items():
            counts[topic] += count
        return dict(sorted(counts.items()))

    @cached_property
    def spec(self) -> RobotSpec:
        """The robot: names, units and ranges of its observations and actions.

        Raises:
            SessionError: the recording names no robot, or two kinds of robots.
        """
        from td3_robot.recording.experience import spec_of

        return spec_of(self._session)

    def messages(self, topic: str) -> Iterator[Message]:
        """The messages of a topic, in recorded order.

        Raises:
            SessionError: the recording has no such messages, or is damaged.
        """
        self._require(topic)
        for _, message in self._session.messages((topic,)):
            yield message

    def arrays(self, topic: str = "step") -> dict[str, NDArray[Any]]:
        """Return the numbers of a topic as arrays with R rows.

        Returns:
            Arrays by field name. A field with one number per row has the shape [R]. A field with O observation
            channels has the shape [R, O], and a field with A action channels has the shape [R, A].
            docs/reference/protocol.md lists the dtypes. ``received_s`` (float64[R], s since 1970) is the time at
            which the recorder received the row. The arrays leave out fields with text, maps, lists or bytes; for
            these fields see :meth:`to_pandas`.

        Raises:
            SessionError: the recording has no such messages, is damaged, or its robots have different channels.
        """
        from td3_robot.recording.export import check_one_kind

        self._require(topic)
        check_one_kind(self._session, (topic,))
        parts: dict[str, list[NDArray[Any]]] = {"received_s": []}
        for entry, message in self._session.messages((topic,)):
            fields = wire_fields(type(message))
            sizes = [len(getattr(message, name)) for name, field in fields.items() if field.kind == "array"]
            rows = sizes[0] if sizes else 1
            parts["received_s"].append(np.full(rows, entry.received * 1e-9))
            for name, field in fields.items():
                if field.kind == "array":
                    parts.setdefault(name, []).append(getattr(message, name))
                elif field.kind in _SCALARS:
                    dtype = _SCALARS[field.kind]
                    parts.setdefault(name, []).append(np.full(rows, getattr(message, name), dtype))
        return {name: np.concatenate(part) for name, part in parts.items()}

    def transitions(self) -> Transitions:
        """Return the transitions of all robots. No transition crosses a gap or the end of an episode.

        Raises:
            SessionError: the recording has no Steps, names no robot, is damaged, or has two kinds of robots.
        """
        from td3_robot.recording.episodes import Episodes

        spec = self.spec
        self._session.require((Step.NAME,))
        splitter = Episodes()
        episodes = [episode for _, step in self._session.messages_of(Step) for episode in splitter.add(step)]
        episodes += splitter.finish()
        observations = [episode.observation for episode in episodes]
        lengths = [len(observation) - 1 for observation in observations]
        last = np.cumsum(lengths) - 1
        ends = {Phase.TERMINATED: np.zeros(sum(lengths), bool), Phase.TRUNCATED: np.zeros(sum(lengths), bool)}
        for row, episode in zip(last, episodes, strict=True):
            if episode.end is not None:
                ends[episode.end][row] = True
        none = np.zeros((0, spec.observation_size), np.float32)
        return Transitions(
            observation=np.concatenate([none, *(observation[:-1] for observation in observations)]),
            action=np.concatenate([np.zeros((0, spec.action_size), np.float32), *(e.action for e in episodes)]),
            reward=np.concatenate([np.zeros(0, np.float32), *(episode.reward for episode in episodes)]),
            next_observation=np.concatenate([none, *(observation[1:] for observation in observations)]),
            terminated=ends[Phase.TERMINATED],
            truncated=ends[Phase.TRUNCATED],
            episode=np.repeat(np.arange(len(episodes)), lengths),
        )

    def to_pandas(self, topic: str = "step") -> pandas.DataFrame:
        """Return a topic as a data frame, with the columns of ``td3-robot export``.

        Needs the extra ``pandas``. Channels are columns such as ``observation.torso.height``. Maps and lists are JSON
        text. For a field of bytes, the column has the number of bytes.

        Raises:
            SessionError: the recording has no such messages, is damaged, or its robots have different channels.
            ModuleNotFoundError: pandas is not installed. The error names the extra.
        """
        from td3_robot.recording.export import check_one_kind, rows

        with extras.advice():
            import pandas
        self._require(topic)
        names = check_one_kind(self._session, (topic,))
        messages = self._session.messages((topic,))
        return pandas.DataFrame.from_records([row for item in messages for row in rows(*item, names)])

    def _require(self, topic: str) -> None:
        self._session.require((arguments.text("topic", topic),))


def open_recording(*files: str | Path) -> Recording:
    """Open a recording. Needs the extra ``record``.

    Args:
        files: one MCAP file, or all parts of one recording in any order.

    Raises:
        SessionError: a file cannot be read, is not a recording, has another protocol version, or is damaged; or the
            files come from different recordings. ``td3-robot recover`` copies the intact data of a damaged file.
        ValueError: no file is given, or a file is given twice.
        ModuleNotFoundError: a package is not installed. The error names the extra that installs it.
    """
    with extras.advice():
        from td3_robot.recording.reader import Session
    if not files:
        raise ValueError("no file given; open_recording needs one recording, or all its parts")
    paths = [arguments.path("file", file) for file in files]
    for number, file in enumerate(paths):
        if file.resolve() in [other.resolve() for other in paths[:number]]:
            raise ValueError(f"file {str(file)!r} is given twice; allowed: each part of a recording once")
    return Recording(Session(paths))
