"""Test ``td3-robot topic list`` and ``show``, wrong arguments, and the form in which ``echo`` prints a message.

tests/process/test_topic.py runs ``echo`` as a process.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from td3_robot.cli.main import main
from td3_robot.cli.topic import _measure, quiet_line, rate, rate_line
from td3_robot.messages import MESSAGES, MotorCommand, Step, Weights, wire_fields
from td3_robot.monitor import node as monitor_node
from td3_robot.recording.values import whole
from td3_robot.topics import TOPICS
from tests.sessions import SECOND, entries_of


def test_list_has_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topic", "list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["TOPIC", "FROM", "TO", "LINK", "RATE", "QUEUE", "RECORDED"]
    assert [line.split()[0] for line in lines] == [topic.message.NAME for topic in TOPICS]
    assert main(["topic", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {
        "topic": "action",
        "from": "policy server",
        "to": "source",
        "link": "policy",
        "rate": "one for each Step",
        "queue": "keep latest",
        "recorded": "sent",
    } in rows


@pytest.mark.parametrize("topic", sorted(MESSAGES))
def test_show_has_every_field(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topic", "show", topic, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["field"] for row in rows] == list(wire_fields(MESSAGES[topic]))
    assert all(row["type"] and row["meaning"] for row in rows)


def test_show_prints_a_readable_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topic", "show", "step"]) == 0
    what, head, *lines = capsys.readouterr().out.splitlines()
    assert what == " ".join((MESSAGES["step"].__doc__ or "").split())
    assert head.split() == ["FIELD", "TYPE", "UNIT", "MEANING"]
    assert any(line.split()[:3] == ["observation", "float32[N,", "O]"] for line in lines)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["show", "acton"], "there is no topic 'acton'; did you mean 'action'?"),
        (["echo", "stepp", "--run", "x"], "there is no topic 'stepp'; did you mean 'step'?"),
        (["echo", "step"], "give either --run DIR (to join a run) or --config FILE (for nodes without a run)"),
        (["echo", "step", "--run", "x", "--count", "0"], "--count is 0; allowed: whole numbers from 1"),
        (["echo", "heartbeat", "--run", "x"], "topic 'heartbeat' cannot be watched; allowed: action, "),
        (["echo", "turn", "--run", "x"], "topic 'turn' cannot be watched"),
        (["show", "x"], "there is no topic 'x'; allowed: action, "),
    ],
)
def test_a_mistake_gives_a_one_line_error(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topic", *words]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("jump", [0, 3600, -3600])
def test_hz_measures_anew_when_somebody_sets_the_clock(
    jump: int, make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulator sends 20 Steps at 50 Hz. Its clock jumps by an hour after ten Steps."""

    def watch(node: object, receive: Any, show: Any, **options: object) -> None:
        del node, options
        for entry in entries_of([("sim-0", make_step(number)) for number in range(20)], period=SECOND // 50):
            receive(replace(entry, published=entry.published + jump * SECOND * (entry.sequence >= 10)), None, {})
        show(None)

    monkeypatch.setattr(monitor_node, "watch", watch)
    _measure(None, Namespace(topic="step", node=None, window=1000, json=True, every=1.0, seconds=None))
    row = json.loads(capsys.readouterr().out)
    assert (row["rate_hz"], row["max_ms"], row["window"]) == (50.0, 20.0, 10 if jump else 20)


def test_hz_says_how_long_a_publisher_has_been_silent() -> None:
    row = {"publisher": "policy", "age_s": 0.8, **rate([0, SECOND // 50, SECOND // 25])}
    line = "policy: 50.00 Hz, min 20.000 ms, max 20.000 ms, std dev 0.000 ms, window 3"
    assert rate_line(row, 1.0) == line
    assert rate_line({**row, "age_s": 7.04}, 1.0) == f"{line}; NO message for 7.0 s"


def test_a_printed_message_has_every_robot_and_every_channel(make_step: Callable[..., Step]) -> None:
    names = {"O": ["x", "y", "z"], "A": ["left", "right"]}
    observation = np.arange(6, dtype=np.float32).reshape(2, 3)
    printed = whole(make_step(3, 2, observation=observation), names)
    assert list(printed) == list(wire_fields(Step))
    assert printed["observation"] == [{"x": 0.0, "y": 1.0, "z": 2.0}, {"x": 3.0, "y": 4.0, "z": 5.0}]
    assert printed["reward"] == [0.0, 0.0]
    assert printed["source"] == "sim-0"
    assert whole(make_step(3, 2, observation=observation), {})["observation"] == observation.tolist()


def test_printing_works_for_messages_about_one_robot_and_about_no_robot() -> None:
    fields = dict.fromkeys(wire_fields(MotorCommand), 0) | {"action": np.array([0.5, 0.25], np.float32)}
    assert whole(MotorCommand(**fields), {"A": ["left", "right"]})["action"] == {"left": 0.5, "right": 0.25}
    assert whole(Weights(1, 0, 0, "", b"abc"), {})["payload"] == b"abc"


def test_the_warning_of_a_quiet_echo_lists_the_publishers_of_the_topic() -> None:
    assert quiet_line("step", None, ()) == "no message with topic 'step' in 5 s"
    assert quiet_line("step", "sim-9", {"sim-1", "sim-0"}) == (
        "no message of 'sim-9' with topic 'step' in 5 s; publishers so far: sim-0, sim-1"
    )
