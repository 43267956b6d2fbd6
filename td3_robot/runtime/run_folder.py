"""The folder of one run: its results, checkpoints, logs and endpoints."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError, RunFolderError
from td3_robot.messages import Status
from td3_robot.topics import LINKS
from td3_robot.transport.endpoints import is_tcp, with_host
from td3_robot.util import files
from td3_robot.util.process_lock import locked

_CHECKPOINT = re.compile(r"checkpoint-(\d{12,})\.safetensors")


class RunFolder:
    """The paths of a run; :meth:`create` makes a new folder, :meth:`open` opens an existing one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.learner_file = path / ".learner"
        self.policy_file = path / "policy.safetensors"
        self.best_file = path / "best.safetensors"
        self.checkpoints = path / "checkpoint"
        self.replay = path / "replay"
        self.curve_file = path / "curve.png"
        self.tensorboard = path / "tensorboard"
        self.logs = path / "logs"
        self._run_file = path / "run.json"
        self._final_file = path / "final.json"

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """Make a new run in an empty or missing folder.

        The configuration makes the folder a run, so it comes first: if Ctrl-C or a kill interrupts this method, the
        folder is still new, or already a run.

        Raises RunFolderError if the folder is not empty or cannot be made.
        """
        run = cls(path)
        run.check_new()
        try:
            path.mkdir(parents=True, exist_ok=True)
            files.write_atomically(run.config_file, config.to_yaml().encode())
            for folder in (run.checkpoints, run.logs):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise _unmakeable(path, error) from None
        return run

    def check_new(self) -> None:
        """Check that the folder is missing or empty, and can be made and written. Raises RunFolderError if not.

        A kill can leave an unfinished configuration in the folder. The folder still counts as empty.
        """
        if self.config_file.exists():
            raise RunFolderError(f"run folder {str(self.path)!r} already holds a run; name another folder")
        try:
            if any(not files.is_unfinished(item, self.config_file) for item in self.path.iterdir()):
                raise RunFolderError(f"run folder {str(self.path)!r} is not empty and not a run; name another folder")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _unmakeable(self.path, error) from None
        place = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        try:
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            raise _unmakeable(self.path, error) from None

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open a folder that holds a run. Raises RunFolderError if the folder holds no run."""
        run = cls(path)
        if not run.config_file.is_file():
            raise RunFolderError(f"run folder {str(path)!r} holds no run: there is no config.yaml in it")
        for folder in (run.checkpoints, run.logs):
            folder.mkdir(exist_ok=True)
        return run

    def config(self) -> Config:
        """Read the configuration of the run.

        If ``run.json`` names a folder of keys, and this folder exists, the configuration uses this folder.
        """
        keys = str(self.read_run().get("keys") or "")
        there = keys and Path(keys).is_dir()  # after the supervisor was killed, run.json names deleted keys
        return configuration.load(self.config_file, [f"endpoints.keys={json.dumps(keys)}"] if there else [])

    def trained_with(self) -> Config | None:
        """Read the configuration of the newest training of this run.

        Return None if ``run.json`` holds no valid configuration.
        """
        with contextlib.suppress(yaml.YAMLError, ConfigError):
            content = yaml.safe_load(str(self.read_run().get("config", "")))
            return configuration.parse(content, source=str(self._run_file)) if content else None
        return None

    def write_run(self, **facts: Any) -> None:
        """Add facts about the running training to ``run.json``, for example endpoints or configuration."""
        files.write_atomically(self._run_file, (json.dumps({**self.read_run(), **facts}, indent=2) + "\n").encode())

    def write_final(self, statuses: Mapping[str, Status]) -> None:
        """Write ``final.json``: the last figures and counters of each process that has sent a Status."""
        rows = {
            name: {"state": status.state, "figures": status.figures, "counters": status.counters}
            for name, status in statuses.items()
        }
        files.write_atomically(self._final_file, (json.dumps(rows, indent=2) + "\n").encode())

    @property
    def of_deployed_learner(self) -> bool:
        """Whether a person made this folder for a deployed learner. ``td3-robot train`` makes all other run folders.

        A deployed learner needs the key ``endpoints.learner``. Only a training writes ``run.json``.
        """
        return not self._run_file.exists() and self.config().endpoints.learner is not None

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run has checkpoints, including damaged ones."""
        return any(self.checkpoints.glob("checkpoint-*"))

    def steps_made(self) -> int:
        """Return how many environment steps the run has made.

        The result is the highest of these: 0, the steps in ``final.json``, and the steps in each checkpoint's name.
        """
        made = 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            made = int(json.loads(self._final_file.read_text())["learner"]["figures"]["env_steps"])
        names = (path.name for path in self.checkpoints.iterdir()) if self.checkpoints.is_dir() else ()
        return max([made, *(int(found[1]) for found in map(_CHECKPOINT.fullmatch, names) if found)])

    def read_run(self) -> dict[str, Any]:
        """Return the facts in ``run.json``, or an empty map if the file is missing or damaged."""
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(self._run_file.read_text())
            if isinstance(facts, dict):
                return facts
        return {}

    def endpoint(self, link: str, config: Config) -> str:
        """Return the endpoint of a link: from the configuration, otherwise the endpoint that the supervisor chose.

        Raises:
            RunFolderError: the run is not running, and the configuration does not set this endpoint.
        """
        configured: str | None = getattr(config.endpoints, link)
        endpoint = configured or self.read_run().get("endpoints", {}).get(link)
        if not endpoint:
            raise RunFolderError(
                f"run folder {str(self.path)!r}: no {link} endpoint; start its training first, or set endpoints.{link}"
            )
        return str(endpoint)

    def to_bind(self, link: str, config: Config, name: str = "") -> list[str]:
        """Return the endpoints that the server of a link binds. May raise RunFolderError, see :meth:`endpoint`.

        If the configuration sets the endpoint of the link, the server binds only this endpoint. Otherwise, a policy
        server on a cluster has a second endpoint, for operators on other hosts. If ``cluster.bind`` is set, it replaces
        the host of each TCP endpoint that the supervisor chose.
        """
        chosen = [self.endpoint(link, config)]
        if getattr(config.endpoints, link):
            return chosen
        if link == "policy" and (second := self._on_cluster().get(name)):
            chosen.append(second)
        host = config.cluster.bind
        return [with_host(endpoint, host) if host and is_tcp(endpoint) else endpoint for endpoint in chosen]

    def policy_servers(self, config: Config, target: str = "") -> list[str]:
        """Return the endpoints at which operators reach the policy servers. A run on a cluster may have several.

        Args:
            config: the configuration of the run.
            target: name of a policy server, or of a source that it serves; empty for all policy servers.

        Raises:
            RunFolderError: the run is not running, or the cluster has no policy server or source with this name.
        """
        found = self._on_cluster()
        if not found:
            return [self.endpoint("policy", config)]
        if target and target not in found:
            known = ", ".join(sorted(found))
            what = f"no policy server or simulator is named {target!r}"
            raise RunFolderError(f"run folder {str(self.path)!r}: {what}; allowed: {known}")
        return [found[target]] if target else list(dict.fromkeys(found.values()))

    def _on_cluster(self) -> dict[str, str]:
        """Return the endpoints for operators; empty without a cluster.

        The keys are the names of the policy servers and of their sources.
        """
        found = self.read_run().get("endpoints", {})
        return {name: str(endpoint) for name, endpoint in found.items() if name not in LINKS}

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process during the block. Raise RunFolderError if it is locked already."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / ".lock", wait=False))
            except BlockingIOError:
                raise RunFolderError(f"run folder {str(self.path)!r} is in use by another training") from None
            yield


def _unmakeable(path: Path, error: OSError) -> RunFolderError:
    return RunFolderError(f"run folder {str(path)!r} cannot be made: {error.strerror or error}")
