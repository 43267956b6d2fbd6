"""Exported tables have a row for each robot of a message, a column for each channel, and the recorded numbers."""

from __future__ import annotations

import csv
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.cli.main import main
from td3_robot.errors import SessionError
from td3_robot.messages import Action, Status
from td3_robot.recording.reader import Session
from td3_robot.recordings import open_recording
from td3_robot.specs import Channel, RobotSpec
from td3_robot.transport import link as handshake
from tests.sessions import BEGIN, entries_of

Make = Callable[..., Any]
PACKAGES = {"parquet": "pyarrow", "ros2": "rosbags", "foxglove": "foxglove", "minari": "minari"}
"""The package that each format needs, from an extra of td3-robot."""


def skip_without_package(form: str) -> None:
    if package := PACKAGES.get(form):
        pytest.importorskip(package, reason=f"needs {package}, which is not installed")


@pytest.fixture
def recorded(acted: Make, save: Make, spec: RobotSpec) -> Path:
    hello = handshake.hello("simulator", "sim-0", client=5, robots=2, spec=spec)
    status = Status("sim-0", "ready", "", {"lag_s": 0.5}, {"steps": 3})
    path: Path = save("a.mcap", entries_of([("sim-0", hello), *acted(10), ("sim-0", status)]))
    return path


def test_csv_export_holds_the_recorded_numbers(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(recorded), "--out", str(tmp_path / "t"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"hello": 1, "weights": 2, "step": 20, "action": 20, "status": 1}
    with (tmp_path / "t" / "action.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    actions = [m.action for _, m in Session([recorded]).messages(("action",)) if isinstance(m, Action)]
    written = np.array([[float(row["action.left"]), float(row["action.right"])] for row in table], np.float32)
    assert written.tobytes() == np.concatenate(actions).tobytes()  # 10 messages of 2 robots
    first_rows = [(row["message"], row["row"], row["answers"]) for row in table[:3]]
    assert first_rows == [("0", "0", "0"), ("0", "1", "0"), ("1", "0", "1")]
    with (tmp_path / "t" / "step.csv").open(encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    assert {"observation.o0", "observation.o2", "reward", "phase"} <= first.keys()
    # Step 0 is message 2, after the Hello and the first Weights.
    assert float(first["published_s"]) == pytest.approx(BEGIN * 1e-9 + 2 / 60, abs=1e-3)
    with (tmp_path / "t" / "status.csv").open(encoding="utf-8") as file:
        (status,) = csv.DictReader(file)
    assert json.loads(status["counters"]) == {"steps": 3}


def test_export_names_the_option_if_a_file_is_in_the_place_of_its_folder(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["export", str(recorded), "--out", str(tmp_path / "file")]) == 2
    text = f"td3-robot export: --out: folder '{tmp_path / 'file'}' cannot be made: File exists"
    assert text in capsys.readouterr().err


def test_parquet_export_holds_the_recorded_numbers(recorded: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert main(["export", str(recorded), "--out", str(tmp_path / "t"), "--format", "parquet", "--topics", "step"]) == 0
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["step.parquet"]
    table = parquet.read_table(tmp_path / "t" / "step.parquet")
    assert table.num_rows == 20
    assert table["sequence"].to_pylist() == [number for number in range(10) for _ in range(2)]
    assert table["observation.o1"].to_pylist() == [float(number) for number in range(10) for _ in range(2)]


def with_another(acted: Make, save: Make, spec: RobotSpec, make_step: Make, **fields: Any) -> Path:
    """A recording of two robots of sim-0 and one robot of sim-1. The Hello of sim-1 was lost."""
    hello = handshake.hello("simulator", "sim-0", client=5, robots=2, spec=spec)
    others = [("sim-1", make_step(number, source="sim-1", **fields)) for number in range(3)]
    path: Path = save("b.mcap", entries_of([*others, ("sim-0", hello), *acted(3)]))
    return path


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_source_without_hello_gets_the_columns_of_the_other_sources(
    form: str, acted: Make, save: Make, spec: RobotSpec, make_step: Make, tmp_path: Path
) -> None:
    observation = np.array([[7.0, 8.0, 9.0]], np.float32)
    path = with_another(acted, save, spec, make_step, observation=observation)
    assert main(["export", str(path), "--out", str(tmp_path / "t"), "--format", form]) == 0
    if form == "csv":
        with (tmp_path / "t" / "step.csv").open(encoding="utf-8") as file:
            table = list(csv.DictReader(file))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(tmp_path / "t" / "step.parquet").to_pylist()
    found = [(row["publisher"], *(float(row[f"observation.o{n}"]) for n in range(3))) for row in table]
    first, second = ("sim-1", 7.0, 8.0, 9.0), [("sim-0", *[float(n)] * 3) for n in range(3) for _ in range(2)]
    assert found == [first] * 3 + second
    assert {"action.left", "action.right"} <= table[0].keys()


def test_robots_with_different_channels_cannot_share_a_table(
    acted: Make, save: Make, spec: RobotSpec, make_step: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_another(acted, save, spec, make_step, observation=np.zeros((1, 4), np.float32))
    assert main(["export", str(path), "--out", str(tmp_path / "t")]) == 2
    error = capsys.readouterr().err
    assert "two kinds of robots" in error
    assert "at the same index, 'sim-1' has channel '0' and 'sim-0' has channel 'o0'; choose other --topics" in error
    assert list((tmp_path / "t").iterdir()) == []
    assert main(["export", str(path), "--out", str(tmp_path / "t"), "--topics", "hello", "weights"]) == 0


def test_a_robot_with_an_additional_channel_cannot_share_a_table(
    acted: Make, save: Make, spec: RobotSpec, make_step: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = replace(spec, actions=(*spec.actions, Channel("brake", "N", -1.0, 1.0)))
    other = handshake.hello("simulator", "sim-1", client=6, robots=1, spec=more)
    step = make_step(0, source="sim-1", action=np.zeros((1, 3), np.float32))
    hello = handshake.hello("simulator", "sim-0", client=5, robots=2, spec=spec)
    path = save("b.mcap", entries_of([("sim-0", hello), ("sim-1", other), ("sim-1", step), *acted(3)]))
    assert main(["export", str(path), "--out", str(tmp_path / "t")]) == 2
    assert (
        "at the same index, 'sim-0' has no channel and 'sim-1' has channel 'brake'; choose" in capsys.readouterr().err
    )


@pytest.mark.parametrize("form", ["csv", "parquet", "ros2", "foxglove"])
def test_a_failed_export_leaves_no_file(
    form: str, recorded: Path, save: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last Action is malformed."""
    for package in {"parquet": ["pyarrow"], "ros2": ["rosbags.typesys"], "foxglove": ["foxglove"]}.get(form, []):
        pytest.importorskip(package)
    *entries, status = Session([recorded]).entries()
    malformed = save("b.mcap", [*entries[:-1], replace(entries[-1], payload=b"\xc1"), status])
    assert main(["export", str(malformed), "--out", str(tmp_path / "t"), "--format", form]) == 2
    assert "action: not msgpack" in capsys.readouterr().err
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.parametrize("name", ["faulted", "walkers"])
def test_csv_and_parquet_exports_hold_equally_many_rows_of_every_topic(name: str, tmp_path: Path, capsys: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    recording = Path(__file__).parent.parent / "replay" / "sessions" / f"{name}.mcap"
    counts = []
    for form in ("csv", "parquet"):
        out = ["--out", str(tmp_path / form), "--format", form, "--json"]
        assert main(["export", str(recording), *out]) == 0
        counts.append(json.loads(capsys.readouterr().out))
    assert counts[0] == counts[1]
    assert {"turn", "hello", "step", "status"} <= counts[0].keys()
    turns = [m for _, m in Session([recording]).messages(("turn",))]
    table = parquet.read_table(tmp_path / "parquet" / "turn.parquet")
    assert [json.loads(text) for text in table["inputs"].to_pylist()] == [turn.inputs for turn in turns]  # type: ignore[attr-defined]


def test_wrong_options_are_refused(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(recorded), "--out", str(tmp_path / "t"), "--topics", "stepp"]) == 2
    assert "'stepp' is not a topic; allowed: hello" in capsys.readouterr().err
    assert main(["export", str(recorded), "--out", str(tmp_path / "t"), "--topics", "step", "throttle"]) == 2
    assert "a.mcap' holds no 'throttle'; it holds action, hello, status, step, weights\n" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()
    assert main(["export", str(recorded), "--out", str(tmp_path / "t")]) == 0
    # Without --force, export overwrites no file.
    assert main(["export", str(recorded), "--out", str(tmp_path / "t")]) == 2
    assert "action.csv' exists already; to replace it, add --force" in capsys.readouterr().err
    assert main(["export", str(recorded), "--out", str(tmp_path / "t"), "--force"]) == 0


def test_a_hostile_topic_cannot_name_a_file_outside_the_folder(
    recorded: Path, save: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a check of topics, export --force would remove precious.csv.

    If --topics selects only known topics, export succeeds.
    """
    entries = list(Session([recorded]).entries())
    hostile = save("b.mcap", [*entries, replace(entries[-1], topic="../precious", sequence=0)])
    precious = tmp_path / "precious.csv"
    precious.touch()
    command = ["export", str(hostile), "--out", str(tmp_path / "t"), "--force"]
    assert main(command) == 2
    assert "b.mcap' holds the topic '../precious', which this version does not know" in capsys.readouterr().err
    assert precious.exists()
    assert main([*command, "--topics", "step"]) == 0
    with pytest.raises(SessionError, match=r"topic '\.\./precious' is not one of"):
        open_recording(hostile).arrays("../precious")


@pytest.mark.parametrize("form", ["ros2", "foxglove", "minari"])
def test_export_does_not_replace_the_recording_that_it_reads(
    form: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recording has the name of an exported file, or is in the folder of an exported dataset."""
    skip_without_package(form)
    name = {"minari": f"{form}-v0/{form}.mcap"}.get(form, f"{form}.mcap")
    recording = tmp_path / name
    recording.parent.mkdir(exist_ok=True)
    content = recorded.read_bytes()
    recording.write_bytes(content)
    for option in ([], ["--force"]):
        assert main(["export", str(recording), "--out", str(tmp_path), "--format", form, *option]) == 2
        target = tmp_path / name.partition("/")[0]
        error = f"td3-robot export: {str(target)!r} is a recording to export, or contains one; name another --out\n"
        assert capsys.readouterr().err == error
        assert recording.read_bytes() == content


@pytest.mark.parametrize(("form", "name"), [("csv", "step.csv"), ("parquet", "step.parquet"), ("ros2", "ros2.mcap")])
def test_a_failed_export_keeps_the_files_of_an_earlier_export(
    form: str, name: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of files acts like a full disk."""
    skip_without_package(form)
    out = tmp_path / "t"
    out.mkdir()
    (out / name).write_text("an earlier export")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        words = ["export", str(recorded), "--out", str(out), "--format", form, "--force"]
        code = main([*words, "--topics", "step"] if form != "ros2" else words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"td3-robot export: {out / name}: ")
    assert "File too large" in error
    assert error.count("\n") == 1
    assert {path.name: path.read_text() for path in out.iterdir()} == {name: "an earlier export"}
