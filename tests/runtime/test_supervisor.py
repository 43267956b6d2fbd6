"""The supervisor counts the deaths of processes, and starts the processes again on hosts that join."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from td3_robot.config.schema import Config
from td3_robot.runtime.child import Child, ChildState
from td3_robot.runtime.hosts import NoRoomError, Start, ThisMachine
from td3_robot.runtime.launch import Process, ProcessRow, RestartRule
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.supervisor import Supervisor


class OneLostHost(ThisMachine):
    """The simulator has lost its host. With ``room``, another host has joined and can start the simulator."""

    def __init__(self, run: Path, simulator: Process) -> None:
        super().__init__(run)
        self.room = False
        self.started: list[int] = []
        self._simulator = simulator

    def start(self, start: Start) -> Any:
        if not self.room:
            raise NoRoomError
        self.started.append(start.incarnation)

    def joined(self) -> Sequence[Process]:
        return [self._simulator] if self.room else []


def test_the_loss_of_a_host_counts_as_one_death(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    simulator = Process("sim-0", ProcessRow(module="sims", restart=RestartRule(times=3)))
    hosts, said = OneLostHost(run.path, simulator), list[str]()
    supervisor = Supervisor(run, Config(), [simulator], said.append, hosts)
    child = Child(simulator, run, hosts)
    supervisor.children = [child]
    supervisor._restart(child, -9)
    assert child.state is ChildState.OVER
    assert said[-1] == "no host has room for sim-0; the run continues without it"
    supervisor._add_joined()
    hosts.room = True
    supervisor._add_joined()
    assert hosts.started == [1]
    assert supervisor.restarts == {"sim-0": 1}
