"""An operator uses the page in a real Chromium to command a real policy server and a real driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dashboard.browser import Page
from tests.dashboard.conftest import Site
from tests.process.deployed_robot import PATIENT, POLICY, SAFE, Robot, bundle, periods

DEADLINE = 5000 // 20
"""A click must stop the robot within 5 s, counted in control periods of 20 ms. An idle machine needs 1 or 2 periods."""
RESULT = "document.querySelector('#result').textContent"


@pytest.fixture
def robot(tmp_path: Path) -> Iterator[Robot]:
    made = Robot(tmp_path)
    yield made
    made.end()


def test_the_stop_button_stops_a_robot_within_5_s(page: Page, serve: Callable[..., Site], robot: Robot) -> None:
    """A viewer cannot stop the robot. An operator can stop it, and then uses the other buttons."""
    robot.configure(**PATIENT)
    server, _ = robot.serve(), robot.drive()
    running = robot.running()
    site = serve("--config", "robot.yaml")

    page.open(site.address)
    page.wait("document.querySelector('#why').textContent.startsWith('You can only watch')")
    assert page.run("[...document.querySelectorAll('[data-verb]')].every((button) => button.disabled)")
    page.click("#estop")

    page.open(site.operate)
    page.wait("!document.querySelector('#estop').disabled")
    page.wait("document.querySelector('[data-node=leg]')?.cells[1].textContent === 'active'")
    assert SAFE not in robot.record()[running:]  # a viewer's click did nothing
    # The page shows the counters of the driver and the policy server, although no supervisor started these nodes.
    for node, count in (("leg", "steps "), ("policy", "actions ")):
        page.wait(f"document.querySelector('[data-node={node}] + .more').textContent.includes('{count}')")
    begin = len(robot.record())
    page.click("#estop")
    safe = robot.wait_for(SAFE, begin)
    assert periods(robot.record()[begin:safe]) <= DEADLINE
    page.wait(f"{RESULT}.startsWith('estop: done, confirmed by leg; state of the policy server: fault')")
    page.wait("document.querySelector('[data-node=leg]').cells[1].textContent === 'fault: emergency stop: dashboard'")

    page.run("window.confirm = () => true")
    for verb, state in (("activate", "an emergency stop is in force"), ("reset", "server: inactive")):
        page.click(f"#actions [data-verb={verb}]")
        page.wait(f"{RESULT}.startsWith('{verb}: ') && {RESULT}.includes('{state}')")
    page.click("#actions [data-verb=activate]")
    robot.wait_for(POLICY, safe)
    page.wait(f"{RESULT}.startsWith('activate: done, confirmed by leg')")
    bundle(0.25, version=4).save(robot.folder / "other.safetensors")
    page.run("document.querySelector('#policy').value = 'other.safetensors'")
    for verb, torque in (("load", "apply 0.250000"), ("rollback", POLICY)):
        begin = len(robot.record())
        page.click(f"#actions [data-verb={verb}]")
        robot.wait_for(torque, begin)
        page.wait(f"{RESULT}.startsWith('{verb}: done')")
    for verb in ("unfreeze", "freeze", "deactivate"):
        page.click(f"#actions [data-verb={verb}]")
        page.wait(f"{RESULT}.startsWith('{verb}: done')")
    robot.wait_for(SAFE, begin)

    server.kill()
    server.wait()
    page.wait("document.querySelector('[data-node=policy]').cells[1].textContent.startsWith('silent, was ')")
    robot.serve(log="again.log")
    page.wait("/^(in)?active/.test(document.querySelector('[data-node=policy]')?.cells[1].textContent)")
    page.wait("document.querySelector('#connection').textContent === 'live'")
    assert page.problems == []
