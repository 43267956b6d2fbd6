"""Test ``td3-robot node``, and the errors of ``td3-robot policy`` for wrong arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from td3_robot import operators
from td3_robot.bundle import Bundle
from td3_robot.cli import node as node_command
from td3_robot.cli.main import main
from td3_robot.errors import CommandError
from td3_robot.messages import Command, Reply
from td3_robot.operator_replies import confirmed, with_faults
from td3_robot.runtime import process
from td3_robot.transport import codec


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("node", "arguments are required: VERB"),
        ("node dance --endpoint ipc://x", "VERB is 'dance'; allowed: state"),
        ("node state", "one of the arguments --run --config --endpoint is required"),
        ("node state --run nowhere", "holds no run"),
        ("node state --endpoint carrier-pigeon", "is not understood"),
        ("node state --endpoint tcp://10.0.0.1:5555", "beyond loopback"),
        ("node state --config empty.yaml", "sets no endpoints.policy"),
        ("node state --endpoint ipc://x --timeout 0", "--timeout is 0; allowed: above 0 s"),
        (
            "node load --endpoint ipc://x",
            "is not allowed; these verbs have an argument: load POLICY, rollback [VERSION]",
        ),
        ("node load nothing --endpoint ipc://x", "there is no policy 'nothing'"),
        ("node rollback one --endpoint ipc://x", "rollback to 'one'"),
        (f"node rollback {'9' * 5000} --endpoint ipc://x", "rollback to '9999"),
        ("node estop --target a/b --endpoint ipc://x", "--target is 'a/b'; allowed: 1 to 64 letters"),
        (f"node freeze --reason {'x' * 1001} --endpoint ipc://x", "--reason has 1001 characters; at most 1000 are"),
        ("policy --config empty.yaml --set endpoints.keys=~nosuchuser/x", "'~nosuchuser/x': there is no such user"),
        (
            "policy --config empty.yaml --bundle /dev/zero",
            "policy '/dev/zero' cannot be read: not a regular file",
        ),
        ("node estop now --endpoint ipc://x", "estop with now"),
        ("node watch now --endpoint ipc://x", "watch with now"),
        ("node state --force --endpoint ipc://x", "--force is not allowed with state; allowed: with load"),
        ("node watch --json --endpoint ipc://x", "--json is not allowed with watch; allowed: with state, configure"),
        (
            "node takeover --json --target leg --endpoint ipc://x",
            "--json is not allowed with takeover; allowed: with state",
        ),
        (
            "node watch --index 1 --endpoint ipc://x",
            "--index is not allowed with watch; allowed: with takeover, give_back",
        ),
        (
            "node watch --reason test --endpoint ipc://x",
            "--reason is not allowed with watch; allowed: with state, configure",
        ),
        ("node takeover --endpoint ipc://x", "takeover needs --target NAME; 'td3-robot node state' lists the robots"),
        ("policy", "give either --run DIR (to join a run) or --config FILE"),
        ("policy --config empty.yaml --run nowhere", "either --run DIR"),
        ("policy --config empty.yaml", "there is nothing to serve: give --bundle FILE, or set endpoints.learner"),
        ("policy --config empty.yaml --bundle nothing", "there is no policy 'nothing'"),
        ("policy --config empty.yaml --bundle toy.safetensors", "endpoints.policy is not set"),
        ("policy --config empty.yaml --bundle toy.safetensors --set safety.rate=0", "safety.rate"),
        (
            "policy --config empty.yaml --bundle toy.safetensors --set safety.rate.up=1",
            "safety.rate: robot 'Toy' has no action 'up'",
        ),
        ("policy --run nowhere --set seed=1", "--set needs --config"),
    ],
)
def test_a_wrong_argument_gives_one_line_and_exit_code_2(
    words: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make_bundle: Callable[..., Bundle],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_catch_signals", lambda _: None)  # pytest handles the signals
    (tmp_path / "empty.yaml").write_text("")
    make_bundle().save(tmp_path / "toy.safetensors")
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


class Asked:
    """A bus that records sent messages."""

    def __init__(self) -> None:
        self.sent: list[Command] = []

    def send(self, to: str, message: Command) -> bool:
        assert to == "policy"
        self.sent.append(message)
        return True


def _confirmed(bus: Any, verb: str, reply: Reply, messages: Iterator[Any]) -> tuple[Reply, str]:
    """Return the Reply with the robots that confirmed, and the error text (empty if all robots confirmed)."""
    try:
        return confirmed(bus, verb, reply, messages), ""
    except CommandError as error:
        return error.reply, str(error)


def test_estop_lists_the_robots_that_confirmed_and_the_robots_that_did_not() -> None:
    """Robot `a` stops. Robot `b` replies that it has not stopped. Robot `c` does not reply."""
    bus: Any = Asked()
    reply = Reply(1, "policy", "", "fault", {"connected": ["a", "b", "c\x1b"]})

    def messages() -> Iterator[Reply]:
        yield Reply(2, "b", "", "fault", {"stopped": True})  # the reply to another command
        for command in bus.sent[:2]:
            yield Reply(command.id, command.target, "", "fault", {"stopped": command.target == "a"})

    answer, words = _confirmed(bus, "estop", reply, messages())
    assert [(command.verb, command.target) for command in bus.sent] == [("state", name) for name in ("a", "b", "c\x1b")]
    assert (answer.detail["confirmed"], answer.detail["unconfirmed"]) == (["a"], ["b", "c\x1b"])
    assert words == r"estop is NOT confirmed by 'b (fault), c\x1b (no answer)'"


def test_robots_that_do_not_activate_are_named_with_their_states() -> None:
    bus: Any = Asked()
    reply = Reply(1, "policy", "", "active", {"connected": ["a", "b", "c"]})

    def messages() -> Iterator[Reply]:
        for command in bus.sent[:2]:
            yield Reply(command.id, command.target, "", "active" if command.target == "a" else "unconfigured", {})
        # The server replies, because robot `c` has just disconnected.
        yield Reply(bus.sent[2].id, "policy", "no robot 'c' is connected", "active", {})

    answer, words = _confirmed(bus, "activate", reply, messages())
    assert (answer.detail["confirmed"], answer.detail["unconfirmed"]) == (["a"], ["b", "c"])
    who = "b (unconfigured), c (no robot 'c' is connected)"
    assert words == f"activate is NOT confirmed by {who}; to command one robot alone, give its name as target"
    nobody = Reply(1, "policy", "", "active", {"connected": []})
    assert _confirmed(bus, "activate", nobody, iter([]))[1] == ""


def test_the_error_of_an_emergency_stop_counts_the_robots_that_the_reply_does_not_name() -> None:
    bus: Any = Asked()
    reply = Reply(1, "policy", "", "fault", {"connected": ["a"], "connected_in_all": 3})

    def messages() -> Iterator[Reply]:
        yield Reply(bus.sent[0].id, "a", "", "fault", {"stopped": True})

    answer, words = _confirmed(bus, "estop", reply, messages())
    assert answer.detail["confirmed"] == ["a"]
    assert words == "estop is NOT confirmed by 2 more robots"


@pytest.mark.parametrize("reason", ["smoke \udce9", "x" * 5000])
def test_an_invalid_reason_does_not_prevent_an_emergency_stop(reason: str) -> None:
    """The terminal's encoding can differ from UTF-8, and a user can paste a text that is too long."""
    parsed = node_command._parser().parse_args(["estop", "--endpoint", "ipc://x", "--reason", reason])
    command = node_command._command(parsed)
    codec.encode(command)
    assert command.reason == ("smoke ?" if "smoke" in reason else "x" * 1000)


def test_an_emergency_stop_without_a_connected_robot_is_an_error() -> None:
    bus: Any = Asked()
    _, words = _confirmed(bus, "estop", Reply(1, "policy", "", "fault", {"connected": []}), iter([]))
    assert words == "no robot is connected, so no robot has confirmed the stop"


def test_a_policy_too_large_for_a_command_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make_bundle: Callable[..., Bundle],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_bundle().save(tmp_path / "toy.safetensors")
    monkeypatch.setattr(operators, "LONGEST_PAYLOAD", 100)
    assert main(["node", "load", "toy.safetensors", "--endpoint", "ipc://x"]) == 2
    error = capsys.readouterr().err
    assert "at most 100 can be loaded into a running server; start the server with this policy: td3-robot" in error


def test_a_takeover_without_standard_input_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python sets ``sys.stdin`` to None if the file descriptor is closed (``<&-`` in a shell)."""
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["node", "takeover", "--target", "leg", "--endpoint", "ipc://x"]) == 2
    assert "takeover reads standard input, which is closed" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_an_invalid_timeout_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "estop", "--endpoint", "ipc://x", f"--timeout={seconds}"]) == 2
    assert f"--timeout is {seconds}; allowed: above 0 s" in capsys.readouterr().err


def test_an_empty_endpoint_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "state", "--endpoint", ""]) == 2
    assert "endpoint '' is not understood; allowed: ipc://PATH, tcp://HOST:PORT" in capsys.readouterr().err


def test_the_output_of_state_begins_with_faults_and_emergency_stops(capsys: pytest.CaptureFixture[str]) -> None:
    """Robot `leg` reports a fault. The server gets no observation from `arm`. Robot `sim` is in an emergency stop."""
    bus: Any = Asked()

    def receive(_: float) -> list[tuple[None, Reply]]:
        states = [(command, "fault" if command.target == "leg" else "active") for command in bus.sent]
        detail = {"reason": "no action for 200 ms"}
        return [(None, Reply(command.id, command.target, "", state, detail)) for command, state in states]

    bus.receive = receive
    bus.welcome = lambda _: True
    sources = {"arm": {"watch": "fault", "reason": "no observation"}, "leg": {"watch": "active", "reason": ""}}
    detail = {"version": 3, "sources": sources, "connected": ["leg", "hand"], "stopped": ["sim"]}
    reply = with_faults(bus, Reply(1, "policy", "", "active", detail))
    assert reply.detail["faults"] == {"sim": "emergency stop", "arm": "no observation", "leg": "no action for 200 ms"}
    assert reply.detail["robots"] == {"leg": "fault", "hand": "active"}
    node_command._print(reply)
    assert capsys.readouterr().out.splitlines()[:4] == [
        "FAULT sim: emergency stop",
        "FAULT arm: no observation",
        "FAULT leg: no action for 200 ms",
        "policy: active",
    ]


def test_state_without_a_fault_prints_no_fault_line(capsys: pytest.CaptureFixture[str]) -> None:
    bus: Any = Asked()
    reply = with_faults(bus, Reply(1, "policy", "", "active", {"version": 3, "connected": []}))
    node_command._print(reply)
    assert reply.detail["faults"] == {}
    assert capsys.readouterr().out.splitlines()[:2] == ["policy: active", "  version: 3"]


class Answering:
    """An operator whose policy server gives a fixed answer."""

    def __init__(self, answer: Reply | CommandError) -> None:
        self._answer = answer

    def ask(self, command: Command) -> Reply:
        assert command.verb == "estop"
        if isinstance(self._answer, CommandError):
            raise self._answer
        return self._answer


def test_a_silent_policy_server_of_a_cluster_does_not_hide_the_answers_of_the_others() -> None:
    answers = [CommandError("no answer from policy-0"), Reply(1, "policy-1", "", "fault", {})]
    shown: list[Reply] = []

    def ask(*given: Reply | CommandError) -> int:
        some: Any = [Answering(answer) for answer in given]
        return node_command._ask(some, operators.make_command("estop"), shown.append)

    with pytest.raises(CommandError, match=r"^no answer from policy-0$"):
        ask(*answers)
    partly = CommandError("estop is NOT confirmed by sim-3", Reply(1, "policy-2", "", "fault", {}))
    with pytest.raises(CommandError, match=r"^no answer from policy-0; estop is NOT confirmed by sim-3$"):
        ask(*answers, partly)
    assert ask(answers[1], Reply(1, "policy-2", "", "fault", {"faults": {"sim-3": "emergency stop"}})) == 1
    assert ask(answers[1]) == 0
    assert [reply.node for reply in shown] == ["policy-1", "policy-1", "policy-2", "policy-1", "policy-2", "policy-1"]
