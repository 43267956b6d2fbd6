"""DDPG: deep deterministic policy gradient (Lillicrap et al. 2016, algorithm 1)."""

from __future__ import annotations

from td3_robot.learner.algorithms.td3 import TD3


class DDPG(TD3):
    """TD3 without its three additions. So DDPG has one critic, no target policy smoothing and no delay.

    ``learner.algorithm: ddpg`` implies ``twin_critics: false``, ``target_noise: 0`` and ``policy_delay: 1`` (see
    :data:`td3_robot.learner.algorithms.table.IMPLIED`). With these values :meth:`update` is the update of the paper.
    """
