"""The configuration section ``cluster``: a training on the hosts of a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from td3_robot.config.section import NonNegative, Section


class ClusterConfig(Section, frozen=True):
    """Settings of ``td3-robot train --cluster``. Other trainings ignore them.

    Attributes:
        simulators: number of simulator processes on the cluster; null for the key ``simulators``.
        simulator_cpus, learner_cpus: processor cores that Ray reserves for each simulator and for the learner.
        addresses: the address at which other hosts reach a host, by the address that Ray shows for this host. It is
            necessary only where the two differ.
    """

    simulators: Annotated[int, Meta(ge=1, le=64)] | None = None
    simulator_cpus: NonNegative = 1.0
    learner_cpus: NonNegative = 1.0
    addresses: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
