"""A pytest plugin. It replays each recording in a folder as a test, and provides fixtures for your tests.

In ``pyproject.toml``::

    [tool.pytest.ini_options]
    td3_robot_sessions = ["tests/sessions"]

pytest loads the plugin automatically. The plugin imports the rest of td3-robot only when a test needs it.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from td3_robot.recording.reader import Session
    from td3_robot.testing import FakeRobot, ManualClock
    from td3_robot.transport.memory import MemoryBus

INI = "td3_robot_sessions"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(INI, "folders whose recordings (*.mcap) are replayed as tests by td3-robot", "paths", [])


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse a folder without recordings, or with a recording that pytest would leave out.

    A suite that checks nothing must not pass.
    """
    for folder in _folders(session.config):
        if not folder.is_dir():
            raise pytest.UsageError(f"{INI}: {str(folder)!r} is not a folder")
        recordings = [path for path in folder.rglob("*.mcap") if not path.is_dir()]
        if not recordings:
            raise pytest.UsageError(f"{INI}: {str(folder)!r} holds no recordings (*.mcap)")
        for path in recordings:
            if not path.exists():
                target = str(path.readlink())
                raise pytest.UsageError(f"{INI}: {str(path)!r} is a link to {target!r}, which does not exist")
            folders = path.relative_to(folder).parts[:-1]
            for pattern in session.config.getini("norecursedirs"):
                if any(fnmatch(name, pattern) for name in folders):
                    raise pytest.UsageError(f"{INI}: pytest ignores {str(path)!r}: norecursedirs has {pattern!r}")


def _folders(config: pytest.Config) -> Sequence[Path]:
    return [Path(folder).resolve() for folder in config.getini(INI)]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    place = file_path.parent.resolve()  # the recording itself may be a link to a file elsewhere
    if file_path.suffix == ".mcap" and any(folder in (place, *place.parents) for folder in _folders(parent.config)):
        return SessionCollector.from_parent(parent, path=file_path)
    return None


class SessionCollector(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield SessionItem.from_parent(self, name="replay")


class SessionItem(pytest.Item):
    """Replays one recording through every core that is installed."""

    def runtest(self) -> None:
        from td3_robot.errors import Td3RobotError
        from td3_robot.recording.reader import Session
        from td3_robot.replay import check as replay

        try:
            session = Session([self.path])
            reports = replay.check(session)
        except Td3RobotError as error:
            pytest.fail(str(error), pytrace=False)
        text = replay.text(session, reports)
        if not replay.passed(reports):
            command = f"td3-robot replay {shlex.quote(str(self.path))} --update"
            pytest.fail(f"{text}\nif you changed this on purpose: {command}", pytrace=False)
        self.add_report_section("call", "replay", text)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"replay of {self.path.name}"


@pytest.fixture
def recorded_session() -> Callable[..., Session]:
    """``recorded_session(PATH, …)`` opens a recording, or all its parts, as a :class:`Session`."""
    from td3_robot.recording.reader import Session

    return lambda *paths: Session([Path(path) for path in paths])


@pytest.fixture
def memory_bus(manual_clock: ManualClock) -> Callable[[], MemoryBus]:
    """Makes in-memory buses that can connect to each other, see :class:`td3_robot.transport.memory.MemoryBus`."""
    from td3_robot.transport.memory import MemoryBus, Network

    return functools.partial(MemoryBus, Network(), manual_clock)


@pytest.fixture
def manual_clock() -> ManualClock:
    """A clock that the test moves, see :class:`td3_robot.testing.ManualClock`."""
    from td3_robot.testing import ManualClock

    return ManualClock()


@pytest.fixture
def fake_robot(manual_clock: ManualClock) -> Callable[..., FakeRobot]:
    """``fake_robot(POLICY)`` makes a :class:`FakeRobot` that is connected to a policy.

    POLICY is a Bundle, or the name of a policy, see :func:`find_policy`.
    """
    from td3_robot.bundle import Bundle
    from td3_robot.policies import find_policy
    from td3_robot.policy.core import PolicyCore
    from td3_robot.testing import FakeRobot

    def make(policy: Path | str | Bundle, *, exploring: bool = False, seed: int = 0) -> FakeRobot:
        bundle = policy if isinstance(policy, Bundle) else Bundle.load(find_policy(policy))
        core = PolicyCore(seed, exploring=exploring)
        core.load(max(1, int(bundle.provenance.get("version", 1))), bundle)
        return FakeRobot(core, bundle.spec, manual_clock)

    return make
