"""Test that ``td3-robot doctor`` reports problems and remedies."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from td3_robot.cli import doctor
from td3_robot.cli.main import main
from td3_robot.transport.keys import KeyFolder
from td3_robot.util import machine


def findings(capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, tuple[str, str]]:
    assert main(["doctor", "--json"]) == code
    found = json.loads(capsys.readouterr().out)["findings"]
    return {item["name"]: (item["state"], item["text"]) for item in found}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default key folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_TIMEOUT", 600.0)
    return tmp_path / "td3-robot" / "keys"


def test_doctor_reports_missing_keys_and_a_missing_compiler(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    found = findings(capsys)
    for name in ("python", "base packages", "train", "record", "sockets of runs", "processor"):
        assert found[name][0] == "ok", name
    assert "torch 2." in found["train"][1]
    assert found["C++ compiler"] == (
        "no",
        "there is no C++ compiler '/nowhere/g++' (to use another one, set CXX): learner.compile has no effect",
    )
    assert found["this machine's keys"] == ("no", f"none in {home}; to make keys: td3-robot keys create NAME")


def test_doctor_reports_the_key_pair_and_warns_if_others_can_read_it(
    capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    folder = KeyFolder(home)
    folder.create("robot-7")
    assert findings(capsys)["this machine's keys"] == ("ok", f"robot-7, other known keys: 0, folder: {home}")
    folder.secret_file.chmod(0o644)
    state, text = findings(capsys, code=1)["this machine's keys"]
    assert state == "BAD"
    assert "has mode 0644; allowed is 0600" in text


def test_a_missing_package_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "mcap" else find(name, *rest))
    found = findings(capsys)
    assert found["record"] == ("no", "needs mcap, which is not installed; pip install 'td3-robot[record]'")
    assert found["train"][0] == "ok"


def test_a_package_that_fails_to_import_is_bad_and_a_package_without_version_is_ok(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (("mcap", "raise ImportError('no libz')"), ("onnx", "")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the child process imports from this folder
    version = machine.version
    monkeypatch.setattr(machine, "version", lambda name: "" if name == "onnx" else version(name))
    found = findings(capsys, code=1)
    assert found["record"] == ("BAD", "cannot be imported: mcap: ImportError: no libz")
    assert found["bundle export --onnx"] == ("ok", "onnx")


def test_a_package_that_prints_when_python_ends_is_ok(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "onnx.py").write_text("import atexit\nprint('hello', end='')\natexit.register(print, 'bye')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert findings(capsys)["bundle export --onnx"][0] == "ok"


@pytest.mark.parametrize("text", ["", "1", "[]"])
def test_a_package_whose_import_ends_the_process_is_bad(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "onnx.py").write_text(f"import os\nprint({text!r}, flush=True)\nos._exit(0)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert findings(capsys, code=1)["bundle export --onnx"] == (
        "BAD",
        "cannot be imported: the check ended without a result",
    )


def test_a_socket_folder_with_a_too_long_path_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The path of a socket has at most 107 bytes."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    state, text = findings(capsys, code=1)["sockets of runs"]
    assert state == "BAD"
    assert "allowed: at most 107; to change the folder, set XDG_RUNTIME_DIR or TMPDIR" in text


def test_real_time_is_granted_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Doctor requests a SCHED_FIFO priority and locked memory. The machine grants or refuses each request."""
    assert main(["doctor"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[4:].startswith("real time")]
    assert len(lines) == 2
    lines.sort(key=lambda line: "memory" in line)
    for line, what in zip(lines, ("SCHED_FIFO 1", "memory locked"), strict=True):
        assert what in line
        assert line.startswith("ok") or ("no" in line[:4] and "LimitRTPRIO" in line)
