"""``td3-robot topic echo`` prints the messages of a played recording line by line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from td3_robot_sims.tasks import spec

from td3_robot.messages import Step
from td3_robot.recording.reader import Session
from tests.conftest import poll_until

SESSION = Path(__file__).parent.parent / "replay" / "sessions" / "pendulum.mcap"


def test_echo_prints_one_line_for_each_message_of_a_topic(command: Any, tmp_path: Path) -> None:
    recorded = [(entry, message) for entry, message in Session([SESSION]).messages(("step",))][:5]
    place, begun = f"ipc://{tmp_path}/monitor", time.time()
    echo = command("topic", "echo", "step", "--endpoint", place, "--count", "5")
    echo_of_none = command("topic", "echo", "step", "--endpoint", f"{place}2", "--node", "nobody")
    for name in ("monitor", "monitor2"):  # a player that gets no answer for 10 s ends
        poll_until((tmp_path / name).exists, lambda: "an echo has not started")
    command("play", str(SESSION), "--rate", "10", "--monitor", place)
    assert echo.finish() == 0, echo.output()
    for line, (entry, step) in zip(echo.lines, recorded, strict=True):
        assert isinstance(step, Step)
        printed = json.loads(line)
        assert (printed["publisher"], printed["number"]) == (entry.publisher, entry.sequence)
        assert printed["message"]["sequence"] == step.sequence
        [observation] = printed["message"]["observation"]  # a list with one entry per robot
        assert list(observation) == [channel.name for channel in spec("gymnasium:Pendulum-v1").observations]
        assert list(observation.values()) == step.observation[0].tolist()
        assert begun <= printed["time"] <= time.time()  # the time of playing, not of recording
    assert command("play", str(SESSION), "--rate", "10", "--monitor", f"{place}2").finish() == 0
    echo_of_none.wait_for("WARNING no message of 'nobody' with topic 'step' in 5 s")
    echo_of_none.interrupt()
    assert echo_of_none.finish() == 130
    # On a busy machine, a Bye of the player can be lost. Then the echo logs a warning.
    assert [line for line in echo_of_none.lines if line.startswith("{")] == []


def test_echo_ends_when_its_output_is_closed(command: Any, tmp_path: Path) -> None:
    place = f"ipc://{tmp_path}/monitor"
    words = [sys.executable, "-m", "td3_robot.cli.main", "topic", "echo", "action", "--endpoint", place]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as echo:
        # Both start at the same time. So the echo does not wait for 5 s, after which it would log a warning.
        command("play", str(SESSION), "--rate", "10", "--monitor", place)
        assert echo.stdout
        assert echo.stderr
        assert "action" in json.loads(echo.stdout.readline())["message"]
        echo.stdout.close()
        assert echo.wait(120) == 0
        assert echo.stderr.read() == ""
