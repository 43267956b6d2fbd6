"""The page for the recordings of a run, in a real Chromium."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from td3_robot.messages import Step
from td3_robot.recording.info import examine
from td3_robot.recording.reader import Session
from tests.conftest import poll_until
from tests.dashboard.browser import Page
from tests.dashboard.conftest import Site, make_run

SESSIONS = Path(__file__).parents[1] / "replay" / "sessions"
OPENED = "document.querySelector('#connection').textContent === 'opened {}'"
CELLS = "[...document.querySelectorAll('#{} tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
END = "document.querySelector('#replayed').textContent.includes('exit code')"


def damaged(content: bytes, file: Path) -> Path:
    """Write a recording with one changed byte, at one third of the file."""
    content = bytearray(content)
    content[len(content) // 3] ^= 0xFF
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("name", ["faulted", "deployed", "walkers", "tampered"])
def test_the_page_shows_what_td3_robot_info_reports(
    page: Page, serve: Callable[..., Site], tmp_path: Path, name: str
) -> None:
    run = make_run(tmp_path / "run")
    file = Path(shutil.copy(SESSIONS / f"{name}.mcap", run.path))
    report = examine(file)
    page.open(serve("--run", "run").address)
    page.wait("!document.querySelector('nav').hidden")
    page.click("nav a:not([aria-current])")
    page.wait("document.querySelectorAll('#files button').length === 1")
    page.click("#files button")
    page.wait(OPENED.format(f"{name}.mcap"))

    topics = {row[0]: row[1:] for row in page.run(CELLS.format("topics"))}
    assert list(topics) == list(report["topics"])
    for topic, stream in report["topics"].items():
        shown = [float(topics[topic][column].replace(",", "")) for column in (0, 3, 4)]
        assert shown == [stream["count"], stream["gaps"], stream["missing"]], topic
    fact = "document.querySelector('[data-fact=\"{}\"] dd').textContent.replaceAll(',', '')"
    for label, value in {
        "messages": report["messages"],
        "duration (s)": report["duration_s"],
        "robot steps": sum(report["robot_steps"].values()),
        "policies": report["policy_versions"]["count"],
        "steps without an action in time": report["fallback_steps"],
        "faults": sum(fault["count"] for fault in report["faults"]),
    }.items():
        assert float(page.run(fact.format(label))) == pytest.approx(value, rel=1e-5), label

    events = page.run(CELLS.format("events"))
    first = {text: float(time) for time, kind, text in reversed(events) if kind == "fault"}
    assert first == {fault["what"]: fault["first_s"] for fault in report["faults"]}
    assert len([kind for _, kind, _ in events if kind == "fault"]) == sum(row["count"] for row in report["faults"])
    assert page.run("events.data[0].length") == len(events)

    source = page.run("shown.name").rpartition("/")[0]
    steps = [step for entry, step in Session([file]).messages_of(Step) if entry.publisher == source]
    for index in range(steps[0].observation.shape[1]):
        recorded = [float(step.observation[0, index]) for step in steps]
        assert page.run(f"shown.channels[{index}].values") == pytest.approx(recorded), index
    names = page.run("shown.channels.map((channel) => `${channel.kind}: ${channel.name}`)")
    assert page.run("channels.labels") == names[:4]
    page.run("document.querySelector('#channels tbody tr:nth-child(1) input').click()")
    assert page.run("channels.labels") == names[1:4]
    page.wait("document.querySelectorAll('#chart-events canvas, #chart-channels canvas').length === 2")
    for width in (360, 1440):
        page.layout(width, 800, dark=width == 360)
        page.wait(f"document.documentElement.scrollWidth <= {width}")
    assert page.problems == []


def test_a_lost_connection_is_shown(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    site = serve("--run", "run")
    page.open(site.address.replace("/?", "/recordings?"))
    page.wait("document.querySelector('#connection').textContent.startsWith('no recordings yet')")
    site.process.interrupt()
    assert site.process.finish(30) == 130, site.process.output()
    page.click("#again")
    page.wait(
        "document.querySelector('#connection.bad').textContent.startsWith('no connection to td3-robot dashboard')"
    )


def test_another_robot_can_be_selected(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    file = Path(shutil.copy(SESSIONS / "walkers.mcap", run.path))
    page.open(serve("--run", "run").address.replace("/?", "/recordings?"))
    page.wait("document.querySelectorAll('#files button').length === 1")
    page.click("#files button")
    page.wait("!document.querySelector('#robot').disabled && document.querySelector('#robot').options.length === 4")
    page.run("robot = document.querySelector('#robot'), robot.value = 'sim-0/1', robot.onchange()")
    page.wait("shown.name === 'sim-0/1'")
    steps = [step for entry, step in Session([file]).messages_of(Step) if entry.publisher == "sim-0"]
    assert page.run("shown.channels.at(-1).values") == pytest.approx([float(step.action[1, -1]) for step in steps])
    assert page.problems == []


def test_a_gap_and_damage_are_shown(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    report = examine(damaged((SESSIONS / "faulted.mcap").read_bytes(), run.path / "bad.mcap"))
    assert report["damages"]
    (run.path / "text.mcap").write_text("no recording")
    page.open(serve("--run", "run").address.replace("/?", "/recordings?"))
    page.wait("document.querySelectorAll('#files button').length === 2")
    page.click('[data-recording="bad.mcap"] button')
    page.wait(OPENED.format("bad.mcap"))
    shown = page.run("[...document.querySelectorAll('#damages li')].map((item) => item.textContent)")
    assert shown == [f"Damaged at {damage}" for damage in report["damages"]]
    gaps = [text for _, kind, text in page.run(CELLS.format("events")) if kind == "gap"]
    counted = {topic.partition(" (")[0]: stream for topic, stream in report["topics"].items() if stream["gaps"]}
    assert counted
    assert sorted(gaps) == sorted(f"{topic}: {stream['missing']} missing" for topic, stream in counted.items())
    page.click('[data-recording="text.mcap"] button')
    page.wait("document.querySelector('#connection').textContent.includes('is not an MCAP file')")
    assert [problem for problem in page.problems if "422" not in problem] == []


@pytest.mark.timeout(1600)
def test_a_viewer_replays_a_recording(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("faulted", "tampered"):
        shutil.copy(SESSIONS / f"{name}.mcap", run.path)
    site = serve("--run", "run")
    page.open(site.address.replace("/?", "/recordings?"))
    page.wait("document.querySelectorAll('#files button').length === 2")
    page.click('[data-recording="faulted.mcap"] button')
    page.wait(OPENED.format("faulted.mcap"))
    page.click("#replay")
    page.wait(END, timeout=1400)  # the dashboard replays with the lowest priority
    lines = page.run("document.querySelector('#replayed').textContent").splitlines()
    assert lines[0].startswith("faulted.mcap: the same ")
    assert lines[1].startswith("faulted.mcap: not checked: ")
    assert lines[2:] == ["exit code 0: all compared outputs are as recorded"]
    assert page.problems == []


def test_only_one_replay_runs_at_a_time_and_it_ends_when_the_dashboard_ends(
    serve: Callable[..., Site], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "waits.mcap").write_bytes((SESSIONS / "pendulum.mcap").read_bytes())
    site = serve("--run", "run")
    cookie = site.cookie()
    here = {**cookie, "Origin": f"http://127.0.0.1:{site.port}"}
    path = "/recordings/replay?name=waits.mcap"
    assert site.get(path, cookie, "POST")[0] == 403  # no Origin
    status, _, body = site.get(path, here, "POST")
    assert (status, json.loads(body)["running"]) == (200, True)
    dashboard = psutil.Process(site.process.process.pid)
    poll_until(lambda: [replay.nice() for replay in dashboard.children()] == [19], lambda: "no replay has nice 19", 60)
    replays = dashboard.children()
    replays[0].suspend()  # so that it cannot end
    assert replays[0].cmdline()[3] == "replay"
    assert site.get(path, here, "POST")[0] == 409
    assert json.loads(site.get("/recordings/replay", cookie)[2])["name"] == "waits.mcap"
    site.process.interrupt()
    assert site.process.finish(30) == 130, site.process.output()
    assert psutil.wait_procs(replays, timeout=300)[1] == []


def test_a_command_ends_when_the_dashboard_is_killed(tmp_path: Path) -> None:
    """The command waits for a policy server that does not exist, so it does not end without a reason."""
    pytest.importorskip("starlette", reason="needs td3-robot[dashboard], which is not installed")
    words = ("topic", "echo", "step", "--endpoint", f"ipc://{tmp_path}/policy.sock")
    program = f"import asyncio; from td3_robot.dashboard.recordings import _run; asyncio.run(_run({words!r}))"
    with subprocess.Popen([sys.executable, "-c", program]) as dashboard:
        process = psutil.Process(dashboard.pid)
        poll_until(process.children, lambda: "the command has not started", 60)
        commands = process.children()
        dashboard.kill()
    left = psutil.wait_procs(commands, timeout=60)[1]
    for command in left:
        command.kill()
    assert left == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../outside.mcap",
        "config.yaml",
        "/etc/passwd",
        "sub/inner.mcap",
        "./good.mcap",
        "good.mcap/",
        "%00",
        "folder.mcap",
    ],
)
def test_only_listed_recordings_can_be_opened(serve: Callable[..., Site], tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "sub").mkdir()
    (run.path / "folder.mcap").mkdir()
    os.mkfifo(run.path / "pipe.mcap")
    for file in (tmp_path / "outside.mcap", run.path / "sub" / "inner.mcap", run.path / "good.mcap"):
        shutil.copy(SESSIONS / "tampered.mcap", file)
    site = serve("--run", "run")
    cookie = site.cookie()
    listed: Any = json.loads(site.get("/recordings/list", cookie)[2])
    assert [row["name"] for row in listed["recordings"]] == ["good.mcap"]
    assert listed["home"] == "Live"
    here = {**cookie, "Origin": f"http://127.0.0.1:{site.port}"}
    assert site.get(f"/recordings/content?name={name}", cookie)[0] == 404
    assert site.get(f"/recordings/replay?name={name}", here, "POST")[0] == 404
    assert site.get("/recordings/content?name=good.mcap")[0] == 403  # no token
    assert site.get("/recordings/content?name=good.mcap&robot=--help", cookie)[0] == 422


def test_the_recordings_of_all_runs_are_listed(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(SESSIONS / "tampered.mcap", make_run(tmp_path / "runs" / name).path)
    page.open(serve("--runs", "runs").address)
    page.wait("document.querySelectorAll('#runs tbody tr').length === 2")
    page.click("nav a:not([aria-current])")
    page.wait("document.querySelectorAll('#files button').length === 2")
    assert page.run("document.querySelector('#home').textContent") == "Compare"
    page.click('[data-recording="b/tampered.mcap"] button')
    page.wait(OPENED.format("b/tampered.mcap"))
    assert page.problems == []
