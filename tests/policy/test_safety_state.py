"""Stops, faults and freezes survive a restart of the policy server. Tests of the core and the state file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from td3_robot.bundle import Bundle, sha256
from td3_robot.core_types import Output, Peer
from td3_robot.errors import ConfigError, UsageError
from td3_robot.messages import Command, Step
from td3_robot.policy.core import PolicyCore
from td3_robot.policy.state_file import StateFile, default_path
from td3_robot.safety.lifecycle import Cause, Held
from td3_robot.safety.limits import SafetyConfig
from td3_robot.safety.state import SafetyState
from td3_robot.specs import RobotSpec
from tests.conftest import poll_until
from tests.policy.served_robot import actions, command, leg

STOP, INACTIVE = Held(Cause.STOP, "because"), Held(Cause.INACTIVE)
SAFE = SafetyConfig(observation_deadline_ms=100)
Made = Callable[..., Bundle]


@pytest.fixture
def peer(spec: RobotSpec) -> Peer:
    return leg(spec)


def versions(outputs: list[Output]) -> list[int]:
    return [action.weights_version for action in actions(outputs)]


def begin(bundle: Bundle, state: SafetyState | None = None, **options: Any) -> PolicyCore:
    core = PolicyCore(9, safety=SAFE, **options)
    core.load(1, bundle)
    if state:
        core.resume(state, 0.0)
    return core


def test_an_empty_safety_state_changes_nothing(peer: Peer, make_bundle: Made, make_step: Callable[..., Step]) -> None:
    core = begin(make_bundle(1))
    core.step([(peer, peer.hello), (peer, make_step(1))], 0.0)
    assert core.safety_state == SafetyState()
    before = core.safety_state
    core.step([(peer, make_step(2))], 0.01)
    assert core.safety_state is before  # nothing has changed, so the core makes no new object
    restarted = PolicyCore(9, safety=SAFE)
    restarted.load(1, make_bundle(1))
    assert restarted.resume(core.safety_state, 0.0) == []
    assert versions(restarted.step([(peer, peer.hello), (peer, make_step(1))], 0.0)) == [1]


def test_an_emergency_stop_survives_a_restart(
    peer: Peer, operator: Peer, make_bundle: Made, make_step: Callable[..., Step]
) -> None:
    core = begin(make_bundle(1))
    core.step([(operator, operator.hello), (operator, command("estop"))], 0.0)
    assert core.safety_state.server == STOP
    restarted = begin(make_bundle(1), core.safety_state)
    assert restarted.safety_state == core.safety_state
    assert restarted.lifecycle.reason == "emergency stop: because"
    joined = restarted.step([(peer, peer.hello), (operator, operator.hello), (peer, make_step(1))], 0.1)
    assert [message.verb for to, message in joined if isinstance(message, Command) and to is peer] == ["estop"]
    assert versions(joined) == [0]
    restarted.step([(operator, command("activate"))], 0.1)
    assert versions(restarted.step([(peer, make_step(2))], 0.1)) == [0]
    restarted.step([(operator, command("reset"))], 0.1)
    assert restarted.safety_state == SafetyState(server=INACTIVE)
    restarted.step([(operator, command("activate"))], 0.1)
    assert versions(restarted.step([(peer, make_step(3))], 0.1)) == [1]
    assert restarted.safety_state == SafetyState()


def test_a_stop_of_one_robot_and_a_fault_of_another_survive_a_restart(
    peer: Peer, operator: Peer, make_bundle: Made, make_step: Callable[..., Step]
) -> None:
    other = replace(peer, key=b"3", hello=changed(peer.hello, name="arm"))
    core = begin(make_bundle(1))
    core.step([(peer, peer.hello), (other, other.hello), (operator, operator.hello)], 0.0)
    core.step([(peer, make_step(1)), (other, make_step(1)), (operator, command("estop", "arm"))], 0.0)
    core.step([], 0.11)  # more than 100 ms without an observation of `leg`
    assert core.safety_state.stopped == ("arm",)
    assert core.safety_state.sources["leg"] == Held(Cause.FAULT, "no observation for 100 ms")
    restarted = begin(make_bundle(1), core.safety_state)
    arrived = [(peer, peer.hello), (other, other.hello), (operator, operator.hello)]
    assert versions(restarted.step([*arrived, (peer, make_step(1)), (other, make_step(1))], 0.0)) == [0, 0]
    restarted.step([(operator, command("activate", "leg")), (operator, command("activate", "arm"))], 0.01)
    assert versions(restarted.step([(peer, make_step(2)), (other, make_step(2))], 0.02)) == [1, 0]


AUTOMATIC = SafetyConfig(observation_deadline_ms=100, recovery="automatic", recovery_ms=50)


@pytest.mark.parametrize("until", ["stopped", "reset", "activated"])
def test_only_reset_and_activate_end_a_stop_of_one_robot(
    peer: Peer, operator: Peer, make_bundle: Made, make_step: Callable[..., Step], until: str
) -> None:
    """Automatic recovery ends a FAULT after 50 ms of observations, but never a stop.

    ``moved`` sends 28 Steps, 10 ms apart. They would be enough for a recovery.
    """

    def moved(core: PolicyCore) -> set[int]:
        return {version for n in range(2, 30) for version in versions(core.step([(peer, make_step(n))], n / 100))}

    core = PolicyCore(9, safety=AUTOMATIC)
    core.load(1, make_bundle(1))
    core.step([(peer, peer.hello), (operator, operator.hello), (peer, make_step(1))], 0.0)
    core.step([(operator, command("estop", "leg"))], 0.01)
    if until != "stopped":
        core.step([(operator, command("reset", "leg"))], 0.011)
    if until == "activated":
        core.step([(operator, command("activate", "leg"))], 0.012)
    restarted = PolicyCore(9, safety=AUTOMATIC)
    restarted.load(1, make_bundle(1))
    # resume() returns one line if no policy moves `leg`, and one more line if `leg` is stopped.
    assert len(restarted.resume(core.safety_state, 0.0)) == {"stopped": 2, "reset": 1, "activated": 0}[until]
    restarted.step([(peer, peer.hello), (operator, operator.hello)], 0.0)
    assert moved(restarted) == moved(core) == {1 if until == "activated" else 0}
    if until == "stopped":
        restarted.step([(operator, command("reset", "leg"))], 0.3)
        assert moved(restarted) == {0}
    restarted.step([(operator, command("activate", "leg"))], 0.3)
    assert moved(restarted) == {1}


@pytest.mark.parametrize("verb", ["deactivate", "estop"])
def test_a_stop_or_a_deactivation_survives_a_shutdown(operator: Peer, make_bundle: Made, verb: str) -> None:
    core = begin(make_bundle(1))
    core.step([(operator, operator.hello), (operator, command(verb)), (operator, command("shutdown"))], 0.0)
    assert core.safety_state == (SafetyState(server=INACTIVE) if verb == "deactivate" else SafetyState(server=STOP))
    restarted = begin(make_bundle(1), core.safety_state)
    restarted.step([], 0.0)
    assert not restarted.lifecycle.active


def test_a_freeze_and_a_deactivation_survive_a_restart(operator: Peer, make_bundle: Made) -> None:
    core = begin(make_bundle(1))
    core.step([(operator, operator.hello), (operator, command("freeze")), (operator, command("deactivate"))], 0.0)
    restarted = begin(make_bundle(1), core.safety_state)
    assert restarted.store.frozen
    assert restarted.lifecycle.state == "inactive"
    restarted.step([(operator, operator.hello), (operator, command("unfreeze"))], 0.0)
    assert not begin(make_bundle(1), restarted.safety_state).store.frozen
    assert begin(make_bundle(1), restarted.safety_state, frozen=True).store.frozen  # frozen by its configuration


def test_a_withdrawn_policy_does_not_act_until_activated(operator: Peer, make_bundle: Made) -> None:
    core = begin(make_bundle(1))
    bad = make_bundle(2)
    core.step([(operator, operator.hello), (operator, command("load", payload=bad.encode()))], 0.0)
    core.step([(operator, command("rollback"))], 0.0)
    assert core.safety_state.withdrawn == (sha256(bad.encode()),)
    assert core.safety_state.frozen
    good = begin(make_bundle(1), core.safety_state)
    good.step([], 0.0)
    assert good.lifecycle.active
    again = begin(bad, core.safety_state)
    again.step([(operator, operator.hello)], 0.0)
    assert again.lifecycle.state == "inactive"
    again.step([(operator, command("activate"))], 0.0)  # a person activates it anyway
    assert again.lifecycle.active
    assert again.safety_state.withdrawn == ()


def test_the_file_keeps_the_newest_state(tmp_path: Path) -> None:
    path = tmp_path / "policy.state"
    file = StateFile(path)
    assert file.kept == SafetyState()
    with pytest.raises(UsageError, match="belongs to another running policy server; name another file with --state"):
        StateFile(path)
    for number in range(20):
        file.keep(SafetyState(Held(Cause.STOP, f"reason {number}"), {"arm": Held(Cause.FAULT, "ñ")}, ("leg",)))
    file.close()
    again = StateFile(path)
    again.close()
    assert again.kept == SafetyState(Held(Cause.STOP, "reason 19"), {"arm": Held(Cause.FAULT, "ñ")}, ("leg",))
    assert [found.name for found in tmp_path.iterdir()] == ["policy.state"]


def test_the_longest_possible_list_of_stops_fits_into_the_file(tmp_path: Path) -> None:
    """1024 names of 256 characters need 1.6 MB, because JSON needs six bytes for each control character."""
    names = tuple(f"{number:04}{252 * chr(1)}" for number in range(1024))
    file = StateFile(tmp_path / "policy.state")
    file.keep(SafetyState(stopped=names))
    file.close()
    again = StateFile(tmp_path / "policy.state")
    again.close()
    assert again.kept.stopped == names


def failed_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> StateFile:
    """Return a state file that could not write a stop, because its folder was missing. The folder is there again."""
    folder = tmp_path / "disk"
    folder.mkdir()
    file = StateFile(folder / "policy.state")
    folder.rename(tmp_path / "away")
    file.keep(SafetyState(server=Held(Cause.STOP, "smoke")))
    poll_until(lambda: "cannot be written" in caplog.text, lambda: "no failed write was logged", 60)
    (tmp_path / "away").rename(folder)
    return file


def test_a_failed_write_is_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stop must survive a disk that fails for some time."""
    file = failed_write(tmp_path, caplog)
    poll_until(lambda: "is up to date again" in caplog.text, lambda: "no successful write was logged", 60)
    assert json.loads(file.path.read_text())["stop"] == "smoke"
    assert caplog.text.count("cannot be written") == 1
    file.close()


def test_the_log_says_what_ends_each_state_after_a_restart() -> None:
    causes = {"arm": Held(Cause.STOP, "smoke"), "hip": Held(Cause.FAULT, "NaN"), "leg": Held(Cause.INACTIVE)}
    lines = PolicyCore(0, exploring=False).resume(SafetyState(sources=causes), 0.0)
    assert [line.partition(": ")[0] for line in lines] == [
        "no policy moves 'arm' until reset, then activate",
        "no policy moves 'hip' until activate (if recovery is automatic, valid observations also end the fault)",
        "no policy moves 'leg' until activate",
    ]


@pytest.mark.parametrize("reason", ["fire", ""])
def test_a_new_state_after_a_failed_write_is_reported_as_written(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newer state is another stop, or the empty state, which the file already contains."""
    file = failed_write(tmp_path, caplog)
    file.keep(SafetyState(server=Held(Cause.STOP, reason)) if reason else SafetyState())
    file.close()
    assert json.loads(file.path.read_text()).get("stop", "") == reason
    assert caplog.text.count("is up to date again") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"stop": 1}',
        b'{"other": ""}',
        b'{"held": {"leg": ""}, "causes": {"leg": "none"}}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "policy.state"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is damaged .* and may contain an emergency stop; check the robots, then "):
        StateFile(path)
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_written_or_read_is_an_error_at_startup(tmp_path: Path) -> None:
    words = "cannot be written: No such file or directory; name another file with --state"
    with pytest.raises(ConfigError, match=words):
        StateFile(tmp_path / "nowhere" / "policy.state")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        StateFile(tmp_path)


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "policy.state"
    file = StateFile(path)
    file.keep(SafetyState(frozen=True))
    file.close()
    assert json.loads(path.read_text())["frozen"] is True


OLD = {
    "stop": "smoke",
    "inactive": False,
    "stopped": ["hand"],
    "held": {"leg": "emergency stop: smoke", "arm": "no observation for 100 ms"},
    "idle": ["foot"],
    "frozen": True,
    "withdrawn": ["00ff"],
}


def test_the_file_of_version_0_1_0_is_read(tmp_path: Path) -> None:
    """In ``held``, version 0.1.0 marks a stop only by the text of the reason."""
    path = tmp_path / "policy.state"
    path.write_text(json.dumps(OLD))
    file = StateFile(path)
    file.close()
    assert file.kept == SafetyState(
        server=Held(Cause.STOP, "smoke"),
        sources={
            "leg": Held(Cause.STOP, "smoke"),
            "arm": Held(Cause.FAULT, "no observation for 100 ms"),
            "foot": Held(Cause.INACTIVE),
        },
        stopped=("hand",),
        frozen=True,
        withdrawn=("00ff",),
    )
    assert file.kept.plain() == OLD
    again = StateFile(path)  # the first StateFile has rewritten the file
    again.close()
    assert again.kept == file.kept


def test_a_fault_whose_reason_looks_like_a_stop_stays_a_fault(tmp_path: Path) -> None:
    state = SafetyState(sources={"leg": Held(Cause.FAULT, "emergency stop: of another robot")})
    file = StateFile(tmp_path / "policy.state")
    file.keep(state)
    file.close()
    again = StateFile(tmp_path / "policy.state")
    again.close()
    assert again.kept == state


def kept(path: Path, owner: str, state: SafetyState | None = None) -> SafetyState:
    """Open the state file for ``owner``, write ``state`` if given, and close the file. Return the state in the file."""
    file = StateFile(path, owner)
    if state:
        file.keep(state)
    file.close()
    return file.kept


def test_servers_with_different_configurations_have_separate_state_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, stop = tmp_path / "policy.safetensors", SafetyState(server=STOP)
    first = default_path(bundle, "policy of /a.yaml")
    assert first.name == "policy.safetensors.state"
    kept(first, "policy of /a.yaml", stop)
    second = default_path(bundle, "policy of /b.yaml")
    assert "policy.safetensors.state belongs to policy server policy of /a.yaml" in caplog.text
    assert second.parent == tmp_path
    assert second != first
    assert kept(second, "policy of /b.yaml", SafetyState(frozen=True)) == SafetyState(frozen=True)
    assert default_path(bundle, "policy of /a.yaml") == first
    assert kept(first, "policy of /a.yaml") == stop
    first.unlink()
    # The second server still has its own file, although the file of the first server is gone.
    assert default_path(bundle, "policy of /b.yaml") == second


def test_a_state_file_without_an_owner_belongs_to_the_first_server(tmp_path: Path) -> None:
    """Version 0.1.0 writes no owner. A stop in such a file must stay in force."""
    bundle = tmp_path / "policy.safetensors"
    path = tmp_path / "policy.safetensors.state"
    path.write_text(json.dumps(OLD))
    assert default_path(bundle, "policy of /a.yaml") == path
    assert kept(path, "policy of /a.yaml").server == Held(Cause.STOP, "smoke")
    assert default_path(bundle, "policy of /b.yaml") != path


def test_a_server_can_use_the_state_file_of_another_server_and_the_file_keeps_its_owner(tmp_path: Path) -> None:
    bundle, stop = tmp_path / "policy.safetensors", SafetyState(server=STOP)
    path = default_path(bundle, "policy of /a.yaml")
    kept(path, "policy of /a.yaml", stop)
    assert kept(path, "policy of /b.yaml") == stop
    assert default_path(bundle, "policy of /a.yaml") == path
