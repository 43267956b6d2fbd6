"""Make the screenshots of the dashboard, with a short training and a real Chromium.

python docs/screenshots.py       needs td3-robot[dev] and Chromium; takes about a minute
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.dashboard.browser import Page, chromium  # noqa: E402

SIZES = {
    "dashboard.png": (1280, 1000, False, "header"),
    "dashboard_robot.png": (1280, 1120, False, "#h-nodes"),
    "dashboard_phone.png": (390, 844, True, "header"),
}
"""Pictures of the live page: width and height of the window in pixels, whether the colours are dark, and the element at
the top."""
RECORDING = ("dashboard_recordings.png", 1280, 1000)
"""Picture of the page of recordings: file, width and height."""


def main() -> int:
    """Start a training and its dashboard, and make the screenshots while the training runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = ("evaluation.every=500", "learner.learning_starts=500", "learner.compile=false", "record=true")
        sets = [word for setting in settings for word in ("--set", setting)]
        training = start(folder, "train", "walker2d_fast", "--steps", "1000000", "--out", f"{folder}/run", *sets)
        dashboard = None
        try:
            wait_for(training, "steps")
            dashboard = start(folder, "dashboard", "--run", f"{folder}/run", "--port", "0")
            address = wait_for(dashboard, "operate: ").removeprefix("operate: ").strip()
            with chromium(folder / "browser") as page:
                take(page, address)
        finally:
            for process in (dashboard, training):
                if process:
                    process.send_signal(signal.SIGINT)
                    process.communicate(timeout=120)
    return 0


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "sims")))
    return subprocess.Popen(
        [sys.executable, "-m", "td3_robot", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)},
    )


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Return the next line of the output that contains this text."""
    assert process.stdout
    return next(line for line in process.stdout if text in line)


def take(page: Page, address: str) -> None:
    page.layout(*SIZES["dashboard.png"][:2])
    page.open(address)
    page.wait("returns.data && returns.data.length === 3 && returns.data[0].length > 5", timeout=1200)
    page.wait("trend.length > 60")
    for file, (width, height, dark, top) in SIZES.items():
        page.layout(width, height, dark=dark)
        page.run("new Promise((resolve) => setTimeout(resolve, 1500))")  # until the charts have the new size
        page.run(f"document.querySelector('{top}').scrollIntoView()")
        page.screenshot(IMAGES / file)
    file, width, height = RECORDING
    page.layout(width, height)
    page.click("nav a:not([aria-current])")
    page.wait("document.querySelectorAll('#files button').length === 1")
    page.click("#files button")
    page.wait("document.querySelectorAll('#chart-channels canvas').length === 1")
    page.run("document.querySelector('#h-events').scrollIntoView()")
    page.screenshot(IMAGES / file)


if __name__ == "__main__":
    sys.exit(main())
