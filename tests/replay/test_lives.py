"""Replay of incomplete or invalid recordings. Replay of a core stops before a turn with a missing input.

A turn is one call of a core's ``step``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from td3_robot.cli.main import main
from td3_robot.core_types import Input, Output
from td3_robot.errors import BundleError
from td3_robot.messages import Action, Start, Step
from td3_robot.policy.core import PolicyCore
from td3_robot.recording.entries import Entry, Facts
from td3_robot.recording.reader import Session
from td3_robot.recording.recorder import free_name
from td3_robot.recording.writer import write
from td3_robot.replay import check as replay
from td3_robot.transport import codec

DEPLOYED = Path(__file__).parent / "sessions" / "deployed.mcap"
ALL = Session([DEPLOYED]).counts["policy", 0, "lifecycle"]
ALL_ACTIONS = Session([DEPLOYED]).counts["policy", 0, "action"]
Change = Callable[[Entry], Entry | None]
# The session loads a policy with weights of about 1e30.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Session]:
    """Returns ``changed(CHANGE, METADATA)``, which copies the deployed session. CHANGE gets each entry.

    The copy holds what CHANGE returns. If CHANGE returns None, the copy lacks the entry.
    """

    def make(change: Change, metadata: Mapping[str, str] | None = None) -> Session:
        session = Session([DEPLOYED])
        kept = [item for item in session.attachments.values() if not item.name.startswith(("reference/", "made/"))]
        path = free_name(tmp_path / "a.mcap")
        facts = Facts({**session.metadata, **(metadata or {})}, kept)
        write(path, facts, filter(None, map(change, session.entries())))
        return Session([path])

    return make


def without(publisher: str, topic: str, *numbers: int) -> Change:
    return lambda it: None if (it.publisher, it.topic) == (publisher, topic) and it.sequence in numbers else it


def policy(session: Session) -> tuple[replay.Outcome, int]:
    (report,) = replay.check(session, ["policy"])
    return report, sum(c.compared for c, _ in report.comparisons if c.topic == "lifecycle")


def test_a_missing_turn_ends_the_comparison_of_states(changed: Callable[..., Session]) -> None:
    report, states = policy(changed(without("policy", "turn", 600)))
    assert report.same
    assert report.turns == 600
    assert 4 < states < ALL
    assert any("turn 600 is not recorded" in note for note in report.notes)
    # After the gap, replay rebuilds turns from Steps and Weights, and compares 66 of 166 Actions. It leaves out 81 safe
    # actions, and 19 Actions of two policies that Commands loaded: the recording contains no Weights of these policies.
    assert sum(c.compared for c, _ in report.comparisons if c.topic == "action") == ALL_ACTIONS - 100


@pytest.mark.parametrize(("publisher", "core", "number"), [("leg", "driver", 600), ("policy", "policy", 601)])
def test_the_outputs_of_a_missing_turn_do_not_count_as_a_difference(
    changed: Callable[..., Session], publisher: str, core: str, number: int
) -> None:
    """Only the turn is missing. Its Step or Action is recorded and seems to belong to the previous turn."""
    (report,) = replay.check(changed(without(publisher, "turn", number)), [core])
    assert report.same
    assert report.turns == number


def test_a_missing_output_of_the_last_turn_before_a_gap_does_not_count_as_a_difference(
    changed: Callable[..., Session],
) -> None:
    """A full queue to the recorder loses messages: here the Step of a turn, and the driver's next Turns and Steps."""
    lost: list[Entry] = []
    begun = 0
    for entry in Session([DEPLOYED]).entries(("step", "turn")):
        if entry.publisher == "leg":
            begun += entry.topic == "turn"
            if begun > 601 or (begun == 601 and entry.topic == "step"):
                lost.append(entry)
    gone = {entry.identity for entry in lost[:100]}
    assert lost[0].topic == "step"
    (report,) = replay.check(changed(lambda it: None if it.identity in gone else it), ["driver"])
    assert report.same
    assert report.turns == 601


def test_a_missing_step_is_restored_from_a_turn_that_contains_it(changed: Callable[..., Session]) -> None:
    """A driver can be killed before its Step is recorded. The policy server's Turn holds a copy of the Step."""
    report, states = policy(changed(without("leg", "step", 100)))
    assert report.same
    assert states == ALL
    assert not report.notes


def test_a_missing_input_ends_the_comparison_of_states(changed: Callable[..., Session]) -> None:
    report, states = policy(changed(without("policy", "command", 0)))
    assert report.same
    assert 0 < report.turns < 1259  # the session has 1259 turns of the policy server
    assert states < ALL
    assert any("command" in note and "is not recorded" in note for note in report.notes), report.notes


def test_answers_that_the_recorder_missed_do_not_count_as_a_difference(changed: Callable[..., Session]) -> None:
    """A jump in the sequence of the Actions shows that the recorder missed two Actions."""
    report, states = policy(changed(without("policy", "action", 17, 18)))
    assert report.same
    assert states == ALL
    assert not report.notes


def test_states_of_a_server_are_not_compared_without_its_first_turn_or_policy(
    changed: Callable[..., Session],
) -> None:
    report, states = policy(changed(without("policy", "turn", 0)))
    assert (report.turns, states) == (0, 0)
    assert any("its turns before turn 1 are missing" in note for note in report.notes)
    report, states = policy(changed(without("policy", "weights", 0)))
    assert (report.turns, states) == (0, 0)
    assert any("its first policy is not recorded" in note for note in report.notes)


def _turn(inputs: list[object], now: float = 3.0) -> dict[str, object]:
    return {"now": now, "inputs": inputs}


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (
            _turn([["#00", "step", {"named": [[1]]}]]),
            "policy/turn 50: turn: 'named' of step is [[1]]; needed is a list of text and integers",
        ),
        (_turn([["#00", "step", {"named": 5}]]), "policy/turn 50: turn: 'named' of step is 5; needed is a list"),
        (_turn([], 1e305), "turn 51 of policy: OverflowError in lifecycle.py, line "),
    ],
)
def test_an_impossible_turn_gives_a_one_line_error(
    changed: Callable[..., Session], capsys: pytest.CaptureFixture[str], turn: dict[str, object], words: str
) -> None:
    def spoil(entry: Entry) -> Entry:
        spoilt = (entry.publisher, entry.topic, entry.sequence) == ("policy", "turn", 50)
        return replace(entry, payload=msgpack.packb(turn)) if spoilt else entry

    session = changed(spoil)
    assert main(["replay", str(session.paths[0]), "--core", "policy"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_an_error_in_the_core_fails_the_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A BundleError ends a node, so replay accepts it only in the last turn. Here an earlier turn raises it."""

    def raising(core: PolicyCore, inputs: Sequence[Input], now: float) -> list[Output]:
        outputs = step(core, inputs, now)
        if now > 3 and not outputs:
            raise BundleError("weights are no bundle")
        return outputs

    step = PolicyCore.step
    monkeypatch.setattr(PolicyCore, "step", raising)
    assert main(["replay", str(DEPLOYED), "--core", "policy"]) == 2
    assert re.search(
        r"turn \d+ of policy: BundleError in test_lives.py, line \d+: weights are", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"settings": {}}, "start of policy: the setting 'exploring' is None; needed is bool"),
        ({"config": "task: ["}, "configuration of policy: "),
        ({"config": "tusk: Leg"}, "configuration of policy: "),
    ],
)
def test_an_invalid_start_gives_a_one_line_error(
    changed: Callable[..., Session], capsys: pytest.CaptureFixture[str], fields: dict[str, object], words: str
) -> None:
    def spoil(entry: Entry) -> Entry:
        if (entry.publisher, entry.topic) != ("policy", "start"):
            return entry
        start = codec.decode("start", entry.payload)
        assert isinstance(start, Start)
        return replace(entry, payload=codec.encode(with_fields(start, **fields)))  # type: ignore[arg-type]

    session = changed(spoil)
    assert main(["replay", str(session.paths[0]), "--core", "policy"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_replay_refuses_a_policy_that_the_recorded_server_refused(changed: Callable[..., Session]) -> None:
    """The session loads a policy that gives actions that are not finite. Its Start lacks ``tries_policies``.

    The recorded server accepted the policy. With ``tries_policies``, a server refuses it: its Reply differs.
    """

    def tries(entry: Entry) -> Entry:
        if (entry.publisher, entry.topic) != ("policy", "start"):
            return entry
        start = codec.decode("start", entry.payload)
        assert isinstance(start, Start)
        start = with_fields(start, settings={**start.settings, "tries_policies": True})
        return replace(entry, payload=codec.encode(start))

    (report,) = replay.check(changed(tries), ["policy"])
    assert not report.same
    assert any("gives actions that are not finite" in str(comparison) for comparison in report.comparisons)


def test_messages_count_as_a_difference_if_the_recording_lacks_their_topic(changed: Callable[..., Session]) -> None:
    """The policy server sends 20 Latches. The driver sends 331 MotorCommands; their topic is ``told``."""

    def silent(it: Entry) -> Entry | None:
        return None if it.topic in ("told", "latches") else it

    reports = replay.check(changed(silent), ["policy", "driver"])
    assert [c.counts["not expected"] for r in reports for c, _ in r.comparisons if not c.same] == [20, 331]


def test_the_tolerance_depends_on_the_machine_that_made_the_expected_messages(
    changed: Callable[..., Session], capsys: pytest.CaptureFixture[str]
) -> None:
    """The test copies a recording. The copy names another machine as the machine that made the recording.

    The test also changes the last bit of the Actions that the driver did not apply. ``replay --update`` stores the
    Actions that this machine computes as a reference. Then replay compares the Actions bit for bit with the reference.
    Replay compares other messages with the recording, and allows a tolerance.
    """
    host = json.loads(Session([DEPLOYED]).metadata["host"])
    applied = {step.action.tobytes() for _, step in Session([DEPLOYED]).messages([Step.NAME]) if isinstance(step, Step)}
    elsewhere = {"host": json.dumps({**host, "processor": "Abacus 3000"})}

    def rounded(it: Entry) -> Entry:
        content = msgpack.unpackb(it.payload)
        if it.topic != Action.NAME or content["action"] in applied:
            return it
        value = np.frombuffer(content["action"], "<f4")
        content["action"] = np.nextafter(value, np.float32(0)).tobytes()
        return replace(it, payload=msgpack.packb(content))

    session = changed(rounded, elsewhere)
    command = ["replay", str(session.paths[0]), "--core", "policy", "--core", "driver"]
    assert main(command) == 0
    assert "bit for bit" not in capsys.readouterr().out
    assert main([*command[:4], "--update"]) == 0
    now = Session(session.paths)
    assert now.metadata == session.metadata
    reference = "reference/policy/0/action"
    assert now.attachments.keys() - session.attachments.keys() == {reference, f"made/{reference}"}
    capsys.readouterr()
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if f"the same bit for bit: policy (1259 turns): {ALL_ACTIONS} action" in line]
    near = next(line for line in lines if "the same within tolerance (processor was Abacus 3000" in line)
    assert near.partition("driver (")[2].count(", ") == 5
    # If no attachment names the reference's machine, replay assumes that the recording's machine made the reference.
    older = session.paths[0].with_name("older.mcap")
    kept = [item for name, item in now.attachments.items() if name != f"made/{reference}"]
    write(older, Facts(now.metadata, kept), now.entries())
    assert main(["replay", str(older), "--core", "policy"]) == 0
    assert "bit for bit" not in capsys.readouterr().out
