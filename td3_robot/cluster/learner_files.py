"""The learner's files in a training with ``cluster.storage``.

The files are on the learner's host, at the storage, and in the run folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import ray

from td3_robot.cluster.host import Host
from td3_robot.cluster.question import LOST, first_line
from td3_robot.runtime.run_folder import RunFolder
from td3_robot.runtime.storage import LONGEST, Storage, repeated, retried


class LearnerFiles:
    """Copies the learner's files to the storage, and from there to the run folder.

    Args:
        url: value of ``cluster.storage``.
        run: the run folder.
        say: prints one line for the user.

    Attributes:
        place: the host on which the learner started last, and the learner's folder there; None before the first start.
    """

    place: tuple[Host, str] | None = None

    def __init__(self, url: str, run: RunFolder, say: Callable[[str], None]) -> None:
        self._storage = Storage(url)
        self._run = run
        self._say = say
        self._complete = True  # whether the storage has everything that the learner learned
        self._following = contextlib.ExitStack()  # copies files from the storage to the run folder

    def begin(self) -> None:
        """Copy the learner's files from the run folder to the storage.

        Then a thread repeatedly copies new metrics and policies from the storage to the run folder.
        """
        storage, run = self._storage, self._run
        copied: dict[str, str] = {}

        def last() -> None:
            storage.pull(run.path, copied=copied)
            storage.remember(run, newer=not self._complete)

        storage.claim(run, newer=False)
        storage.push(run.path, {})
        storage.remember(run, newer=True)
        self._following.enter_context(
            repeated(lambda: storage.pull(run.path, checkpoints=False, copied=copied), last, self._say)
        )

    def claim(self) -> None:
        """Become the owner of the storage again, so that the learner of a lost host cannot write there."""
        retried(partial(self._storage.claim, self._run, newer=True))

    def end(self) -> str:
        """After the end of the learner, copy its last files to the storage, and then all files to the run folder.

        Returns:
            the reason why the storage lacks the last files; empty if the copy succeeded, or if the host is lost.
        """
        problem = ""
        host, folder = self.place or (None, "")
        if host and not host.lost:
            self._say(f"copying the last files of the learner to {self._storage.url}")
            kept = ""
            try:
                kept = host.ask("keep", folder)
                ray.get(host.agent.copy.remote(kept), timeout=LONGEST)
            except LOST as error:
                problem = f"host {host.address} could not copy the learner's last files: {first_line(error)}"
                if kept:
                    problem += f"; the host keeps them in {kept}; copy them to the storage, then resume"
        self._complete = not problem and not (host and host.lost)
        self._following.close()
        return problem
