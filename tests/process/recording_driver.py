"""The example driver. It writes a record of its calls, and a test can switch on faults.

python recording_driver.py RECORD FAULT EXAMPLE ARGUMENTS…

RECORD gets one line for each observation, action and stop: ``observe good``, ``apply 0.500000``, ``stop``. It gets
``first reset`` for the first reset. During a fault, the word of the fault replaces ``good``, for example
``observe nan``. FAULT is a file that the test writes. Without the file, or if it is empty, there is no fault. Otherwise
it holds one word:

- ``frozen``: observe() repeats its last observation.
- ``nan``: one channel is NaN.
- ``stop``: observe() raises EmergencyStop.
- ``hang``: observe() never returns.
- ``slow``: observe() takes 30 ms, which is longer than a control period.
- ``stuck``: a long reset() (see EPISODE) never returns.
- ``homing``: a long reset() has a ``yield`` after each part, and never ends. The record gets ``part`` for each part,
  and ``interrupted`` if the driver interrupts the reset.

Environment variables: HOLD_OFF sets ``driver.contact.HOLD_OFF``, in seconds. Before a driver gets a Welcome, it makes
its robot safe whenever the policy server has been silent for HOLD_OFF seconds. EPISODE sets the length of an episode in
periods. With EPISODE, each reset except the first is long: it takes 2 s, and writes ``reset`` when it begins and
``ready`` when it ends. GATE names a file. The driver makes its record at once, and connects to the server only when the
file of GATE exists.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from td3_robot.driver import contact
from td3_robot.driver.node import main
from td3_robot.driver.robot import EmergencyStop
from td3_robot.specs import Float32

contact.HOLD_OFF = float(os.environ.get("HOLD_OFF", contact.HOLD_OFF))
RECORD, FAULT, EXAMPLE = map(Path, sys.argv[1:4])
EPISODE = int(os.environ.get("EPISODE", "0"))
Pendulum: Any = runpy.run_path(str(EXAMPLE))["Pendulum"]


class Recorded(Pendulum):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(EPISODE)
        self._resets = 0
        self._record = RECORD.open("w", buffering=1)
        self._last: Float32 | None = None

    def observe(self) -> Float32:
        fault = FAULT.read_text() if FAULT.exists() else ""
        self._record.write(f"observe {fault or 'good'}\n")
        if fault == "stop":
            raise EmergencyStop("the red button")
        if fault == "hang":
            threading.Event().wait()
        if fault == "slow":
            threading.Event().wait(0.03)
        if self._last is None or fault != "frozen":
            self._last = super().observe()
        return np.where([fault == "nan", False, False], np.float32("nan"), self._last)

    def apply(self, action: Float32) -> None:
        super().apply(action)
        self._record.write(f"apply {action[0]:.6f}\n")

    def reset(self) -> Iterator[None] | None:
        super().reset()
        self._resets += 1
        if self._resets == 1:
            self._record.write("first reset\n")
        if EPISODE and self._resets > 1:
            self._record.write("reset\n")
            fault = FAULT.read_text() if FAULT.exists() else ""
            if fault == "homing":
                return self._home()
            threading.Event().wait(None if fault == "stuck" else 2.0)
            self._record.write("ready\n")
        return None

    def _home(self) -> Iterator[None]:
        try:
            while True:
                self._record.write("part\n")
                yield
        finally:
            self._record.write("interrupted\n")

    def stop(self) -> None:
        self._record.write("stop\n")


robot = Recorded()
while (gate := os.environ.get("GATE")) and not Path(gate).exists():
    threading.Event().wait(0.01)
sys.exit(main(robot, "leg", sys.argv[4:]))
