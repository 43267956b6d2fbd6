"""The configuration section ``cluster``: a training on the hosts of a Ray cluster."""

from __future__ import annotations

import re

from td3_robot.config.section import NonNegative, Section

_MOST = 64  # simulators
_URL = re.compile(r"[a-z][\w+.-]*://[^\s*?\[\]]+")


class ClusterConfig(Section, frozen=True):
    """Settings of ``td3-robot train --cluster``. Other trainings ignore them.

    Attributes:
        simulators: number of simulator processes on the cluster; null for the key ``simulators``. With ``[low, high]``,
            the run uses as many as the hosts have cores for: new hosts get more simulators, and the run continues
            without a lost host while ``low`` simulators remain.
        simulator_cpus, learner_cpus: processor cores that Ray reserves for each simulator and for the learner.
        addresses: the address at which other hosts reach a host, by the address that Ray shows for this host. It is
            necessary only where the two differ.
        storage: URL of a folder to which the run copies the learner's files, for example ``s3://bucket/walker`` or
            ``file:///mnt/walker``; null for none. With a URL, the learner can run on a host that does not see the run
            folder. The package fsspec must know the protocol. Each run needs its own URL.
    """

    simulators: int | tuple[int, int] | None = None  # msgspec 0.22 cannot combine a limit and a tuple
    simulator_cpus: NonNegative = 1.0
    learner_cpus: NonNegative = 1.0
    addresses: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    storage: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.simulators, int) and not 1 <= self.simulators <= _MOST:
            limit = ">= 1" if self.simulators < 1 else f"<= {_MOST}"
            raise ValueError(f"cluster.simulators is {self.simulators}; it must be a whole number {limit}")
        low, high = self.range(1)
        if not 1 <= low <= high <= _MOST:
            raise ValueError(
                f"cluster.simulators is [{low}, {high}]; allowed: two numbers from 1 to {_MOST}, lower first"
            )
        if self.storage is not None:
            self._check_storage(self.storage)

    @staticmethod
    def _check_storage(url: str) -> None:
        protocol, _, rest = url.partition("://")
        if ":" in rest.partition("/")[0].rpartition("@")[0]:
            raise ValueError("cluster.storage contains a password; pass it in the environment of each host instead")
        local = protocol in ("file", "local")
        if not _URL.fullmatch(url) or protocol == "memory" or (local and not rest.startswith("/")):
            raise ValueError(
                f"cluster.storage is {url!r}; allowed: null, or the URL of a folder that all hosts reach, for example "
                "s3://bucket/walker or file:///mnt/walker"
            )

    def range(self, default: int) -> tuple[int, int]:
        """Return the lowest and the highest number of simulators. ``default`` stands for null."""
        asked = default if self.simulators is None else self.simulators
        return asked if isinstance(asked, tuple) else (asked, asked)
