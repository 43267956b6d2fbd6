"""Replay feeds the inputs of recorded sessions to the current code. The code must give the recorded outputs.

The sessions cover every case in NEEDED.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as with_fields
from td3_robot_sims.backends.base import Outcome
from td3_robot_sims.vector_env import VectorEnvironment

from td3_robot.bundle import Bundle, sha256
from td3_robot.config.schema import RecordConfig
from td3_robot.core_types import Peer
from td3_robot.learner.experience.transitions import Assembler
from td3_robot.learner.training import Training
from td3_robot.messages import (
    Action,
    ActionOrigin,
    Command,
    LifecycleChange,
    Message,
    Phase,
    Record,
    Refused,
    Reply,
    Start,
    Step,
    Turn,
    Weights,
)
from td3_robot.policy.noise import Gaussian
from td3_robot.recording.entries import CONFIG, Entry, Facts
from td3_robot.recording.reader import Session
from td3_robot.recording.recorder import Recorder
from td3_robot.recording.writer import write
from td3_robot.replay import check as replay
from td3_robot.topics import RECORDER
from td3_robot.transport import codec
from td3_robot.transport import link as handshake
from td3_robot.transport.tap import RECORDED

# In the session ``deployed``, an operator loads a policy with weights of about 1e30. This policy's actions overflow.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
FILES = sorted((Path(__file__).parent / "sessions").glob("*.mcap"))


TRAINING = {"policy", "simulator", "learner"}
# No learner core ran in the DEPLOYED sessions. Replay gives their Steps to a learner core, and compares the core's
# transitions with the expected transitions. An attachment of the file holds the expected transitions.
DEPLOYED = {"policy", "driver", "learner"}
CORES = dict.fromkeys(("faulted", "pendulum", "tampered", "walkers"), TRAINING)
CORES |= dict.fromkeys(("deployed", "restarted", "takeover"), DEPLOYED)
# For each session: the topics with messages that replay does not compare.
AROUND = {name: {"hello", "welcome", "refused", "bye", "status", "evaluation"} for name in CORES}
for name in ("deployed", "takeover"):
    AROUND[name] |= {"weights"}  # the policy that the server starts with
AROUND["restarted"] |= {"weights", "command"}  # no core sends these: they come from make_sessions.py


@cache
def checked(path: Path) -> list[replay.Outcome]:
    return replay.check(Session([path]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_session_replays_without_a_difference(path: Path) -> None:
    reports = checked(path)
    print(replay.text(Session([path]), reports))
    for report in reports:
        assert report.same, f"{report.core} differs; if you intend this: td3-robot replay {path} --update"
        assert bool(report.compared) == (report.core in CORES[path.stem]), f"{report.core}: {report.notes}"
        there = report.core != "learner" or CORES[path.stem] == TRAINING
        assert bool(report.turns) == (report.core in CORES[path.stem] and there), (
            f"{report.core} replayed {report.turns} turns; required: above 0 if the core ran in the session, else 0"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_later_parts_of_a_session_show_no_difference(path: Path, tmp_path: Path) -> None:
    """Split a session into three or more parts. Replay policy servers and drivers from each part except the first."""
    whole = Session([path])
    seconds = (whole.end - whole.begin) * 1e-9
    facts = Facts(whole.metadata, [item for item in whole.attachments.values() if item.name == CONFIG])
    recorder = Recorder(tmp_path / "a.mcap", facts, RecordConfig(split_s=seconds / 3, weights_every=1), whole.begin)
    peers: dict[tuple[str, int], Peer] = {}
    for entry in whole.entries():
        hello = handshake.hello("node", entry.publisher, client=0, incarnation=entry.incarnation)
        peer = peers.setdefault((entry.publisher, entry.incarnation), Peer(RECORDER, b"k", hello, {}))
        record = Record(entry.topic, entry.link, entry.sequence, entry.published, entry.payload)
        recorder.step([(peer, record)], (entry.received - whole.begin) * 1e-9)
    recorder.close(seconds)
    assert len(recorder.files) >= 3
    compared = 0
    for part in recorder.files[1:]:
        for report in replay.check(Session([part]), ["policy", "driver"]):
            assert report.same, replay.text(Session([part]), [report])
            compared += report.compared
    assert compared > 20


def test_replay_compares_every_topic_except_the_listed_topics() -> None:
    """Replay does not compare these messages: handshakes, Evaluations, some Statuses, and messages that no core sent.

    On another kind of machine, replay does not compare learned results. Notes in the report name these results.
    """
    learned = {"weights", "throttle"} if elsewhere() else set()
    for path in FILES:
        assert set(replay.not_compared(Session([path]), checked(path))) <= AROUND[path.stem] | learned, path.stem


@pytest.mark.parametrize("name", ["pendulum", "walkers"])
@pytest.mark.parametrize(("compiled", "words"), [("C++", "compiled"), (True, "compiled by an earlier version")])
def test_compiled_updates_are_not_compared_with_uncompiled_updates(
    name: str, compiled: str | bool, words: str, tmp_path: Path
) -> None:
    """The recorded weights say that updates were compiled. The configuration disables compilation."""
    only_where_recorded()
    recorded = session(name)

    def entries() -> Iterator[Entry]:
        for entry in recorded.entries():
            message = recorded.decode(entry)
            if isinstance(message, Weights):
                bundle = Bundle.decode(message.payload)
                payload = replace(bundle, provenance={**bundle.provenance, "compiled": compiled}).encode()
                message = with_fields(message, payload=payload, sha256=sha256(payload))
                entry = replace(entry, payload=codec.encode(message))
            yield entry

    facts = Facts(recorded.metadata, list(recorded.attachments.values()))
    write(tmp_path / "a.mcap", facts, entries())
    [report] = replay.check(Session([tmp_path / "a.mcap"]), ["learner"])
    assert report.same
    why = f"the learner's updates were {words}; replay's updates are not compiled"
    assert f"weights, Throttles and losses: {why}" in report.notes
    topics = {comparison.topic for comparison, _ in report.comparisons}
    assert "transition" in topics
    assert not topics & {"weights", "throttle", "loss statistics"}


@dataclass
class Held:
    """What one session contains."""

    robots: set[int] = field(default_factory=set)
    topics: set[str] = field(default_factory=set)
    phases: set[int] = field(default_factory=set)
    origins: set[int] = field(default_factory=set)
    versions: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    lost: int = 0
    late: int = 0
    reconnects: int = 0
    servers: set[tuple[str, int]] = field(default_factory=set)
    states: set[tuple[str, str]] = field(default_factory=set)  # (previous, new) of each change
    stops: int = 0
    rolled_back: int = 0
    missing_observations: int = 0
    # (verb, whether the Command has a target, whether the operator sent the Command)
    commands: set[tuple[str, bool, bool]] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)
    drivers: int = 0
    driver_stops: int = 0
    resumed: int = 0
    refused: int = 0


@cache
def held(path: Path) -> Held:
    result = Held()
    last: dict[tuple[str, int], int] = {}
    for entry, message in Session([path]).messages():
        result.topics.add(entry.topic)
        look(result, last, entry, message)
    return result


def look(result: Held, last: dict[tuple[str, int], int], entry: Entry, message: Message) -> None:
    if isinstance(message, Turn) and entry.publisher == "learner":
        for _, _, fields in (item for item in message.inputs if item[1] == Step.NAME):
            source, incarnation, sequence, _ = fields["named"]
            jump = sequence - last.get((source, incarnation), -1)
            result.lost += jump > 1
            result.late += jump < 0
            last[source, incarnation] = max(sequence, last.get((source, incarnation), -1))
    if isinstance(message, Step):
        result.robots.add(len(message.phase))
        result.phases |= set(message.phase.tolist())
        result.origins.add(message.origin)
    elif isinstance(message, Action):
        server = entry.publisher, entry.incarnation
        versions = result.versions.setdefault(server, set())
        result.rolled_back += 0 < message.weights_version < max(versions, default=0)
        versions.add(message.weights_version)
        result.servers.add(server)
    elif isinstance(message, Start):
        result.roles.add(message.role)
        result.drivers += message.role == "driver"
        result.resumed += bool(message.settings.get("latches", {}).get("stop"))
    elif isinstance(message, LifecycleChange):
        result.states.add((message.previous, message.state))
        result.stops += "emergency stop" in message.reason
        result.missing_observations += "no observation" in message.reason
    elif isinstance(message, Reply):
        result.refused = max(result.refused, message.detail.get("counters", {}).get("weights_refused", 0))
    elif isinstance(message, Command):
        result.commands.add((message.verb, bool(message.target), entry.link == RECORDER))
        result.driver_stops += message.verb == "estop" and entry.publisher != "policy"
    elif isinstance(message, Refused):
        result.reconnects += message.code == "hello"


NEEDED: dict[str, Callable[[Held], bool]] = {
    "a termination": lambda it: Phase.TERMINATED in it.phases,
    "a truncation": lambda it: Phase.TRUNCATED in it.phases,
    "a swap of weights": lambda it: any(len(versions) > 2 for versions in it.versions.values()),
    "a lost Step": lambda it: it.lost > 0,
    "a late Step": lambda it: it.late > 0,
    "an action that arrived too late": lambda it: ActionOrigin.HELD in it.origins,
    "a reconnect to a restarted policy server": lambda it: it.reconnects > 0 and len(it.servers) > 1,
    "a safe action": lambda it: ActionOrigin.SAFE in it.origins,
    "a fault": lambda it: ("active", "fault") in it.states,
    "a recovery": lambda it: ("fault", "active") in it.states,
    "a fault because observations are missing": lambda it: it.missing_observations > 0,
    "a rollback": lambda it: it.rolled_back > 0,
    "an emergency stop": lambda it: it.stops > 0,
    "an operator's emergency stop of all robots": lambda it: ("estop", False, True) in it.commands,
    "an operator's emergency stop of one robot": lambda it: ("estop", True, True) in it.commands,
    "an emergency stop that a driver sends": lambda it: it.driver_stops > 0,
    "a stop that stays in force after a restart of the policy server": lambda it: it.resumed > 0,
    "a driver that leaves and returns": lambda it: it.drivers > 1,
    "weights that are refused": lambda it: it.refused > 0,
    "a policy that an operator loaded": lambda it: ("load", False, True) in it.commands,
    "a driver": lambda it: "driver" in it.roles,
    "an operator's action": lambda it: ActionOrigin.OPERATOR in it.origins,
    "one robot": lambda it: it.robots == {1},
    "several robots": lambda it: max(it.robots) > 1,
}


@pytest.mark.parametrize("what", NEEDED)
def test_the_sessions_cover_each_needed_case(what: str) -> None:
    assert any(NEEDED[what](held(path)) for path in FILES), f"no session holds {what}; see make_sessions.py"


def test_the_sessions_cover_every_topic() -> None:
    together = set().union(*(held(path).topics for path in FILES))
    assert {kind.NAME for kind in RECORDED} - together == set()


def compared() -> set[str]:
    return {comparison.topic for path in FILES for report in checked(path) for comparison, _ in report.comparisons}


def test_every_kind_of_comparison_is_made() -> None:
    wanted = {"action", "step", "status", "transition", "lifecycle", "reply", "command", "heard", "state"}
    assert wanted | {"told", "latches"} <= compared()


def test_learned_results_are_compared() -> None:
    only_where_recorded()
    assert {"weights", "throttle", "loss statistics"} <= compared()


def only_where_recorded() -> None:
    """Skip the test if another kind of machine made a session with learned results."""
    if why := elsewhere():
        pytest.skip(why)


def elsewhere() -> str | None:
    """Return replay's note that learned results come from another kind of machine; None without such a note."""
    notes = (note for path in FILES for report in checked(path) for note in report.notes)
    return next((note for note in notes if "same kind of machine" in note), None)


def test_the_sessions_stay_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < 2_000_000


def session(name: str) -> Session:
    return Session([path for path in FILES if path.stem == name])


def differing(name: str, core: str) -> dict[str, int]:
    (report,) = replay.check(session(name), [core])
    return {field: count for comparison, _ in report.comparisons for field, count in comparison.counts.items()}


def test_a_changed_reward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 1046 rewards changes by 0.01.

    Replay on another machine allows a difference of 1e-4 · (1 + |reward|). Pendulum's rewards are between -16.3 and 0,
    so the allowed difference is below 1.8e-3.
    """
    unchanged, made = VectorEnvironment._continue, itertools.count()

    def changed(self: VectorEnvironment, robot: int, outcome: Outcome, action: Any) -> None:
        reward = outcome.reward + 1e-2 * (next(made) == 300)
        unchanged(self, robot, Outcome(outcome.observation, reward, outcome.terminated, outcome.truncated), action)

    monkeypatch.setattr(VectorEnvironment, "_continue", changed)
    assert differing("pendulum", "simulator") == {"reward": 1}


def test_changed_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaussian noise becomes 0.1 % larger. The uniform warm-up actions stay the same."""
    block = Gaussian.block
    monkeypatch.setattr(Gaussian, "block", lambda self, generator: block(self, generator) * np.float32(1.001))
    (count,) = differing("pendulum", "policy").values()
    assert 100 < count < 1046


def test_replay_finds_transitions_that_join_steps_across_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 60 of the session ``tampered`` is lost. A wrong assembler joins Steps 59 and 61.

    The session has three robots, so this gives three false transitions.
    """
    add = Assembler.add

    def changed(self: Assembler, step: Step) -> Any:
        if step.sequence > 60:
            step = with_fields(step, sequence=step.sequence - 1, episode_step=step.episode_step - np.uint32(1))
        return add(self, step)

    monkeypatch.setattr(Assembler, "add", changed)
    found = differing("tampered", "learner")
    assert found["not expected"] == 3
    assert found["counters"] == 1


def test_a_changed_update_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay repeats every update. With another learning rate, it computes other policies than the recorded ones."""
    only_where_recorded()
    update = Training.update
    monkeypatch.setattr(Training, "update", lambda self, _: update(self, 0.9e-3))
    assert differing("walkers", "learner").keys() == {"payload", "sha256"}
