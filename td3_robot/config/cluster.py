"""The configuration section ``cluster``: a training on the hosts of a Ray cluster."""

from __future__ import annotations

import re

from td3_robot.config.section import NonNegative, Section

_MOST = 64  # simulators
_BIND = re.compile(r"[^\s:;\[\]/]+|[0-9a-fA-F:]*:[0-9a-fA-F:]*")  # name, interface or IPv4 address; or IPv6 address
_URL = re.compile(r"[a-z][\w+.-]*://[^\s*?\[\]]+")


class ClusterConfig(Section, frozen=True):
    """Settings of ``td3-robot train --cluster``. Other trainings ignore them.

    Attributes:
        simulators: number of simulator processes on the cluster. With null, the top-level key ``simulators`` gives the
            number. With ``[low, high]``, the processor cores of the hosts determine the number. If a host joins, the
            run can start more simulators there. If a host is lost, its simulators move to another host. If no other
            host has enough cores, the run continues without these simulators, as long as the number of remaining
            simulators is at least the value ``low``.
        simulator_cpus: processor cores that Ray reserves for each simulator.
        learner_cpus: processor cores that Ray reserves for the learner.
        wait_s: at the start, the run waits at most this many seconds until the hosts have cores for the lowest number
            of simulators.
        addresses: each map key is the address that Ray shows for a host. The value is the address at which other hosts
            reach this host. List a host only if its two addresses differ.
        bind: the address or network interface that each host binds, for example ``0.0.0.0`` or ``eth1``. Null means
            the address at which other hosts reach this host. Set ``bind`` only if a host must bind a different address,
            for example behind NAT.
        storage: URL of a folder to which the run copies the learner's files, for example ``s3://bucket/walker`` or
            ``file:///mnt/walker``; null for no copies. With a URL, the learner can run on a host that does not see the
            run folder. The package fsspec must support the protocol of the URL. Each run needs its own URL.
    """

    simulators: int | tuple[int, int] | None = None  # msgspec 0.22 cannot combine a limit and a tuple
    simulator_cpus: NonNegative = 1.0
    learner_cpus: NonNegative = 1.0
    wait_s: NonNegative = 0.0
    addresses: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    bind: str | None = None
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
        if self.bind is not None and not _BIND.fullmatch(self.bind):
            raise ValueError(f"cluster.bind is {self.bind!r}; allowed: an address or a network interface, without port")
        if self.storage is not None:
            self._check_storage(self.storage)

    @staticmethod
    def _check_storage(url: str) -> None:
        protocol, _, rest = url.partition("://")
        if re.search(r"[^@]*:[^@]*@", rest):
            raise ValueError("cluster.storage contains a password; pass it in the environment of each host instead")
        local = protocol in ("file", "local")
        if not _URL.fullmatch(url) or "::" in url or protocol == "memory" or (local and not rest.startswith("/")):
            raise ValueError(
                f"cluster.storage is {url!r}; allowed: null, or the URL of a folder that all hosts reach, for example "
                "s3://bucket/walker or file:///mnt/walker"
            )

    def range(self, default: int) -> tuple[int, int]:
        """Return the lowest and the highest number of simulators. If the key is null, both are ``default``."""
        asked = default if self.simulators is None else self.simulators
        return asked if isinstance(asked, tuple) else (asked, asked)
