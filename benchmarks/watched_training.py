"""Measure how much the dashboard slows down a training while somebody watches a robot.

    python benchmarks/watched_training.py [walker2d] [--blocks 12] [--stretch 5] [--set KEY=VALUE] [--json]

The benchmark works like recorded_training.py: it divides one training into stretches. In half of the stretches, a
dashboard with one viewer runs. The viewer reads the live stream as the dashboard's page does. It draws nothing, because
a browser usually runs on another machine.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import recorded_training

from td3_robot.bench import harness
from td3_robot.errors import NodeError


class Dashboards(recorded_training.Recorders):
    """Starts and stops a dashboard, and a viewer that reads its live stream."""

    def start(self) -> None:
        self._pictures = threading.Event()
        command = [sys.executable, "-m", "td3_robot.cli.main", "dashboard", "--run", str(self.run.path), "--port", "0"]
        with (self.run.logs / "dashboard.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(b"view: "):
                address = line.decode().removeprefix("view: ").strip()
                threading.Thread(target=self._watch, args=(address,), daemon=True).start()
                return
        raise NodeError(f"the dashboard ended too early; see {self.run.logs / 'dashboard.log'}")

    def _watch(self, address: str) -> None:
        """Read the live stream until the dashboard ends."""
        place = urlsplit(address)
        first = http.client.HTTPConnection(place.netloc)
        first.request("GET", f"/?{place.query}")
        cookie = first.getresponse().headers["set-cookie"].partition(";")[0]
        stream = http.client.HTTPConnection(place.netloc)
        stream.request("GET", "/events", headers={"Cookie": cookie})
        for line in stream.getresponse():
            if b'"frames":[' in line:
                self._pictures.set()

    def stop(self) -> int:
        """Stop the dashboard if it runs. Return 0, because a dashboard writes no file."""
        if self.process:
            self.process.terminate()
            self.process.wait(recorded_training.STOP_TIMEOUT)
            self.process = None
        return 0

    def writes(self) -> bool:
        """Return whether the viewer has received a picture of a robot.

        Raises:
            NodeError: the dashboard has ended.
        """
        assert self.process
        if self.process.poll() is not None:
            raise NodeError(f"the dashboard ended too early; see {self.run.logs / 'dashboard.log'}")
        return self._pictures.is_set()


def main() -> int:
    options = recorded_training.options("watched_training", "Measure how much a watched dashboard slows a training.")
    with tempfile.TemporaryDirectory() as folder:
        sizes = (options.blocks, options.stretch, options.warm_up)
        figures = recorded_training.measure(options.config, Path(folder), *sizes, options.set, Dashboards)
    report: dict[str, Any] = {"machine": harness.describe("numpy", "msgspec", "starlette", "uvicorn", "torch")}
    for name, value in figures.items():
        if name != "recorded_mb":
            words = (
                {part.replace("recorded", "watched"): item for part, item in value.items()}
                if isinstance(value, dict)
                else value
            )
            report[name.replace("recorder", "dashboard")] = words
    return harness.show(report, options.json, recorded_training.lines)


if __name__ == "__main__":
    harness.run_script(main)
