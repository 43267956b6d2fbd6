"""The reports of ``bench record`` and ``bench replay``. No test checks the speed, because it depends on the machine."""

from __future__ import annotations

import json

import pytest

from td3_robot.cli.main import main


@pytest.mark.parametrize("name", ["record", "replay"])
def test_the_figures_of_a_report_are_positive(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--json", "--steps", "40", "--rounds", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("machine")["processor"]
    assert all(value > 0 for value in report.values())
    if name == "record":
        # Six messages at the start: Hello, Weights, Start, Turn and two LifecycleChanges. Then three messages for each
        # step: Step, Turn and Action.
        assert report["messages"] == 6 + 3 * 40
        # A Step has an observation of 22 numbers, an action of 6 numbers and a reward. An Action has 6 numbers. All are
        # float32. The Step's phase, episode and episode_step have 1 + 8 + 4 = 13 bytes. The field names add bytes.
        assert report["wire_bytes_per_step"] > 4 * (22 + 6 + 1) + 13 + 4 * 6
    assert main(["bench", name, "--steps", "40", "--rounds", "1"]) == 0
    assert "cores" in capsys.readouterr().out
    assert main(["bench", name, "--rounds", "0"]) == 2
