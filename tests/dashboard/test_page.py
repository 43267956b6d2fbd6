"""The dashboard's page in a real Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browser import Page
from tests.dashboard.conftest import RECORDS, Site, make_run

SHOWN = "document.querySelector('[data-name=\"{}\"]')?.cells[2].textContent"


def test_the_page_shows_the_numbers_of_metrics_jsonl(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    site = serve("--run", "run")
    page.open(site.address)
    page.wait("document.querySelectorAll('#records tbody tr').length > 0")
    for kind in ("train", "evaluation"):
        last = [record for record in RECORDS if record["kind"] == kind][-1]
        for name, value in last.items():
            if name != "kind":
                assert float(page.run(SHOWN.format(f"{kind}.{name}"))) == value, name
    page.wait("document.querySelectorAll('#chart-return canvas').length === 1")
    assert page.run("returns.data") == [[1000, 2000], [-12.25, 31.0625], [10.0, 123.456789]]
    with run.metrics_file.open("a") as file:
        file.write('{"kind": "evaluation", "env_steps": 3000, "eval_return_mean": 222.5}\n')
    page.wait(SHOWN.format("evaluation.eval_return_mean") + " === '222.5'")
    assert page.run("location.href") == f"http://127.0.0.1:{site.port}/"  # the token is gone from the address
    assert page.problems == []


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1440, False)])
def test_the_layout_fits_phones_and_desktops(
    page: Page, serve: Callable[..., Site], tmp_path: Path, width: int, dark: bool
) -> None:
    make_run(tmp_path / "run")
    page.layout(width, 800, dark=dark)
    page.open(serve("--run", "run").address)
    page.wait("document.querySelectorAll('#chart-return canvas').length === 1")
    assert page.run("document.documentElement.scrollWidth") <= width
    page.press("Tab", 9)
    assert page.run("document.activeElement.textContent") == "Skip to the content"
    back = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, back[4:-1].split(","))) < 200) == dark
    assert page.problems == []


def test_the_emergency_stop_needs_only_the_keyboard(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    site = serve("--run", "run")
    for address, operator, words in ((site.address, False, "You can only watch"), (site.operate, True, "Commands go")):
        page.open(address)
        page.wait(f"document.querySelector('#why').textContent.startsWith('{words}')")
        focused = []
        for _ in range(4):
            page.press("Tab", 9)
            focused.append(page.run("document.activeElement.textContent"))
        assert focused[:3] == ["Skip to the content", "Live", "Recordings"]
        assert (focused[3] == "EMERGENCY STOP") == operator  # the keyboard skips disabled buttons
    page.press(" ", 32)
    page.wait("document.querySelector('#result').textContent.includes('start its training first')")
    assert page.problems == []


SNAPSHOT = """number => ({
  problem: "", metrics: metricsVersion, begun: 0, faults: [{what: `fault ${number}`, first_s: 1, count: 2}],
  figures: {env_steps: number}, point: {time: number, steps_per_s: 5, updates_per_s: 6, staleness_updates: 7},
  nodes: [{name: "sim-0", role: "simulator", state: "active", detail: "", rate_hz: 60, age_s: 0.1, missing: 0,
           pace: [0, 0, 0, 0, 0, 0, number, 1, 0, 0, 0, 0, 0], counters: {steps: number}, figures: {rate: 1.5}}],
  robots: [{source: "sim-0", index: 0, robots: 1, phase: "mid", episode: 0, episode_step: number, reward: 0.5,
            origin: "policy", observation: [1, 2, number], action: [0.25]}],
  specs: {}, latency: {"sim-0": [0, 0, 0, 0, 0, 0, number, 1, 0, 0, 0, 0, 0]}, drawable: ["sim-0"],
  drawn: {"sim-0/0": {radii: [0.1], frames: Array(10).fill([0, 0, 0, 0, 0, 1])}},
})"""
"""A JavaScript function that makes a snapshot from a number."""


def test_the_memory_of_an_open_page_stays_constant(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    """In this test the page keeps 50 points instead of 1200, so it drops points after 50 snapshots."""
    make_run(tmp_path / "run")
    page.open(serve("--run", "run").address)
    page.wait("document.querySelector('#why').textContent && returns.data")
    page.run("connect = () => null, show_ = show, show = () => null, about.history = 50, true")

    def feed(begin: int, count: int) -> tuple[float, float]:
        """Show snapshots. Return the size of the heap in bytes, and the number of DOM nodes."""
        page.run(f"for (let n = {begin}; n < {begin + count}; n++) show_(({SNAPSHOT})(n))")
        page.call("HeapProfiler.collectGarbage")
        return page.call("Runtime.getHeapUsage")["usedSize"], page.call("Memory.getDOMCounters")["nodes"]

    feed(1000, 200)
    feed(2000, 400)  # the browser compiles the functions
    heap, nodes = feed(2500, 100)
    later_heap, later_nodes = feed(3000, 600)
    assert later_heap - heap < 300_000  # if the page kept all 600 snapshots, the heap would grow by about 1 MB
    assert later_nodes <= nodes + 100
    assert page.run("[trend.length, channelHistory.times.length, channelHistory.rows.length]") == [50, 50, 50]
    assert page.run("[trend.at(-1).time, channelHistory.rows.at(-1)]") == [3599, [1, 2, 3599, 0.25]]
    assert page.problems == []


def test_after_another_robot_is_chosen_the_page_drops_the_queued_frames(
    page: Page, serve: Callable[..., Site], tmp_path: Path
) -> None:
    make_run(tmp_path / "run")
    page.open(serve("--run", "run").address)
    page.wait("document.querySelector('#why').textContent")
    page.run("body.play({radii: [1], frames: Array(10).fill([0, 0, 0, 0, 0, 9])}), body.forget(), true")
    page.run("new Promise((resolve) => setTimeout(resolve, 2000 * body.period))")
    assert page.run("[body.frame, body.size]") == [None, 0]
    assert page.problems == []


def test_the_page_says_why_it_does_not_draw_a_robot(page: Page, serve: Callable[..., Site], tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    page.open(serve("--run", "run").address)
    page.wait("document.querySelector('#why').textContent")
    page.run("connect = () => null, show_ = show, show = () => null, true")

    def shown(index: int, drawable: str = "['sim-0']") -> list[Any]:
        """Choose one of five robots. Return whether the page draws a robot, and the text that says why not.

        The snapshot has pictures of robot 3 only, or no pictures if ``drawable`` is empty.
        """
        page.run(f"live = ({SNAPSHOT})(1), live.drawable = {drawable}, true")
        page.run("live.robots = [0, 1, 2, 3, 4].map((index) => ({...live.robots[0], index, robots: 5})), true")
        page.run("live.drawn = live.drawable.length ? {'sim-0/3': live.drawn['sim-0/0']} : {}, true")
        page.run(f"show_(live), $('robot').value = 'sim-0/{index}', forgetChannels(), show_(live)")
        text = "$('undrawn').checkVisibility() ? $('undrawn').textContent : ''"
        answer: list[Any] = page.run(f"[$('body').checkVisibility(), {text}]")
        return answer

    assert shown(3) == [True, ""]
    assert shown(4) == [False, "The page draws only the first 4 robots of a source."]
    assert shown(3) == [True, ""]
    drawn, text = shown(3, "[]")
    assert not drawn
    assert "because the robot's links are unknown" in text
    assert page.problems == []


@pytest.mark.slow
def test_the_page_follows_a_training_and_reconnects_when_the_next_training_begins(
    page: Page, serve: Callable[..., Site], train: Callable[..., Any], command: Callable[..., Any]
) -> None:
    first = train(200_000, "learner.replay_ratio=0.05")
    first.wait_for_steps(300)
    page.open(serve("--run", "run").address)
    page.wait("document.querySelector('[data-node=learner]')?.cells[1].textContent === 'ready'")
    page.wait("document.querySelector('[data-node=sim-0]')?.cells[1].textContent === 'active'")
    page.wait("+document.querySelector('[data-node=sim-0]').cells[2].textContent.replace(',', '') > 0")
    page.wait("[...document.querySelectorAll('#tiles dt')].some((it) => it.textContent === 'steps/s')")
    page.wait("trend.length > 5 && trend.at(-1).steps_per_s > 0")
    page.wait("document.querySelectorAll('#channels tbody tr').length === 22 + 6")  # observations + actions
    # The first Step of an episode has no action, so wait for a later Step.
    page.wait("document.querySelector('#robot-facts').textContent.includes('action from: policy')")
    page.wait("document.querySelectorAll('#chart-latency canvas, #chart-channels canvas').length === 2")
    page.wait("!document.querySelector('#body').hidden && body.frame?.length === 7 * 6")  # 7 shapes, 2 ends, x y z
    assert 0.2 < page.run("(body.frame[2] + body.frame[5]) / 2") < 1.6  # height of the torso in m
    colours = (
        "new Set(new Uint32Array(body.canvas.getContext('2d').getImageData(0, 0, body.canvas.width, 300).data.buffer))"
    )
    assert page.run(f"{colours}.size") > 5
    first.interrupt()
    assert first.finish() == 130
    page.wait("document.querySelector('#problem').hidden === false")
    second = command("train", "--resume", "run", "--log-every", "0.2")
    page.wait("document.querySelector('#problem').hidden && document.querySelector('[data-node=sim-0]')")
    second.interrupt()
    assert second.finish() == 130
    assert page.problems == []
