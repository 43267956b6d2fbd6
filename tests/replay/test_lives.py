"""What a recording lacks or has wrong is said by replay, and nothing beyond it is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from td3_robot.cli.main import main
from td3_robot.messages import Start
from td3_robot.session import replay
from td3_robot.session.entries import Entry, Facts
from td3_robot.session.reader import Session
from td3_robot.session.recorder import free_name
from td3_robot.session.writer import SessionWriter
from td3_robot.transport import codec

DEPLOYED = Path(__file__).parent / "sessions" / "deployed.mcap"
ALL = Session([DEPLOYED]).counts["policy", 0, "lifecycle"]
Change = Callable[[Entry], Entry | None]
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # a policy of 1e30 is loaded


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[Change], Session]:
    """``changed(CHANGE)``: the deployed session with each entry changed, or left out."""

    def make(change: Change) -> Session:
        session = Session([DEPLOYED])
        attachments = [item for item in session.attachments.values() if not item.name.startswith("reference/")]
        path = free_name(tmp_path / "a.mcap")
        writer = SessionWriter(path, Facts(session.metadata, attachments), 0.0)
        for entry in session.entries():
            if kept := change(entry):
                writer.add(kept)
        writer.close()
        return Session([path])

    return make


def without(publisher: str, topic: str, *numbers: int) -> Change:
    return lambda it: None if (it.publisher, it.topic) == (publisher, topic) and it.sequence in numbers else it


def policy(session: Session) -> tuple[replay.CoreReport, int]:
    (report,) = replay.check(session, ["policy"])
    return report, sum(c.compared for c, _ in report.comparisons if c.topic == "lifecycle")


def test_a_turn_that_is_missing_ends_what_is_compared(changed: Callable[[Change], Session]) -> None:
    report, states = policy(changed(without("policy", "turn", 600)))
    assert report.same
    assert report.turns == 600
    assert 4 < states < ALL
    assert any("turn 600 is not recorded" in note for note in report.notes)


def test_an_input_that_is_missing_ends_it_too(changed: Callable[[Change], Session]) -> None:
    report, states = policy(changed(without("leg", "step", 100)))
    assert report.same
    assert 0 < report.turns < 1200
    assert states < ALL
    assert any("step leg 0 100" in note and "is not recorded" in note for note in report.notes)


def test_an_answer_that_was_not_recorded_is_no_difference(changed: Callable[[Change], Session]) -> None:
    report, states = policy(changed(without("policy", "action", 17, 18)))
    assert report.same
    assert states == ALL
    assert not report.notes


def test_without_its_first_turn_or_its_policy_a_servers_states_are_not_compared(
    changed: Callable[[Change], Session],
) -> None:
    report, states = policy(changed(without("policy", "turn", 0)))
    assert (report.turns, states) == (0, 0)
    assert any("its turns before 1 are missing" in note for note in report.notes)
    report, states = policy(changed(without("policy", "weights", 0)))
    assert (report.turns, states) == (0, 0)
    assert any("the policy it began with is not recorded" in note for note in report.notes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"settings": {}}, "start of policy: exploring is None; needed is bool"),
        ({"config": "task: ["}, "configuration of policy: "),
        ({"config": "tusk: Leg"}, "configuration of policy: "),
    ],
)
def test_a_start_that_makes_no_sense_is_one_line(
    changed: Callable[[Change], Session], capsys: pytest.CaptureFixture[str], fields: dict[str, object], words: str
) -> None:
    def spoil(entry: Entry) -> Entry:
        if (entry.publisher, entry.topic) != ("policy", "start"):
            return entry
        start = codec.decode("start", entry.payload)
        assert isinstance(start, Start)
        return replace(entry, payload=codec.encode(replace(start, **fields)))  # type: ignore[arg-type]

    session = changed(spoil)
    assert main(["replay", str(session.paths[0]), "--core", "policy"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
