"""How the free-running scheduler divides the allowed steps among the sources."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace as changed

from td3_robot.learner.factory import make_core
from td3_robot.learner.scheduling.free import _PORTION, _START_TIME, _equalize
from td3_robot.messages import Step
from td3_robot.specs import RobotSpec
from tests.learner.world import World, config


class Fleet:
    """Simulators with one robot each, and their learner."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.made: dict[str, int] = {}

    def start(self, name: str) -> None:
        self.made[name] = 0
        peer = self.world.peer("simulator", name, robots=1)
        self.world.join(peer)
        self.world.give(peer, self.world.make_step(0, source=name))

    def turn(self, pace: int = 10, **paces: int) -> None:
        """Let each simulator make the steps that the learner has granted to it, but at most ``pace``.

        ``paces`` holds other limits by simulator name. A turn takes 11 ms, plus 1 ms for each step.
        """
        for source in self.world.core.sources.live():
            for _ in range(min(paces.get(source.name, pace), source.granted - self.made[source.name])):
                assert source.peer is not None
                self.made[source.name] += 1  # Step n completes transition n, because Step 0 starts the episode
                self.world.give(source.peer, self.world.make_step(self.made[source.name], source=source.name))
        self.world.time += 0.01
        self.world.idle()


@pytest.fixture
def fleet(request: pytest.FixtureRequest, spec: RobotSpec, make_step: Callable[..., Step]) -> Fleet:
    """A fleet whose learner expects ``request.param`` simulators, and whose warm-up has 2,000 steps."""
    base = config(replay_ratio_band=64, buffer_size=10_000)
    learner = changed(base.learner, learning_starts=2000)
    settings = changed(base, learner=learner, total_steps=50_000, simulators=request.param)
    return Fleet(World(make_core(settings), spec, make_step))


@pytest.mark.parametrize("fleet", [1, 2, 8], indirect=True)
def test_simulators_that_start_one_after_the_other_share_the_warm_up(fleet: Fleet) -> None:
    """Every 20 turns, one more simulator starts. All start within ``_START_TIME``.

    A simulator makes up to 400 steps in 20 turns.
    """
    simulators = fleet.world.core.config.simulators
    for index in range(simulators):
        fleet.start(f"sim-{index}")
        for _ in range(20):
            fleet.turn(20)
    while fleet.world.core.env_steps < 2000:
        fleet.turn(20)
    assert min(fleet.made.values()) >= 0.75 * 2000 / simulators, fleet.made


@pytest.mark.parametrize("fleet", [2], indirect=True)
def test_a_late_simulator_gets_an_equal_part_from_then_on(fleet: Fleet) -> None:
    for name in ("a", "b"):
        fleet.start(name)
    while fleet.world.core.env_steps < 500:
        fleet.turn()
    fleet.world.time += _START_TIME
    fleet.start("c")
    before = dict(fleet.made)
    while fleet.world.core.env_steps < 2000:
        fleet.turn()
    # Each simulator makes about a third of 1,500 further steps. The tolerance is _PORTION: when "c" joins, "a" and "b"
    # already have grants. Each of them can have up to _PORTION granted steps that it has not yet made.
    assert all(abs(steps - before[name] - 500) <= _PORTION for name, steps in fleet.made.items()), fleet.made


@pytest.mark.parametrize("fleet", [2], indirect=True)
def test_a_simulator_waits_for_a_missing_simulator_only_until_the_start_time_is_over(fleet: Fleet) -> None:
    fleet.start("a")
    for _ in range(100):  # 2 s
        fleet.turn(20)
    # The expected number is half of the sum of warm-up and replay_ratio_band: (2,000 + 64) / 2 = 1,032. The learner
    # reserves the other half for the missing simulator.
    assert fleet.made["a"] == 1032
    fleet.world.time += _START_TIME
    for _ in range(100):
        fleet.turn(20)
    assert fleet.made["a"] >= 2000


@pytest.mark.parametrize("fleet", [2], indirect=True)
def test_a_fast_simulator_does_not_wait_for_a_slow_one(fleet: Fleet) -> None:
    """In each turn, "a" can make 1 step, and "b" can make 20 steps. So 100 turns are enough for 1,900 steps."""
    for name in ("a", "b"):
        fleet.start(name)
    for _ in range(100):
        fleet.turn(20, a=1)
    assert fleet.world.core.env_steps >= 1900
    assert fleet.made["a"] >= 90


@given(
    sources=some.lists(some.tuples(some.integers(0, 1000), some.integers(0, 100)), min_size=1, max_size=8),
    free=some.integers(1, 500),
)
def test_the_smallest_shares_grow_first(sources: list[tuple[int, int]], free: int) -> None:
    shares = {str(index): share for index, (share, _) in enumerate(sources)}
    room = {str(index): most for index, (_, most) in enumerate(sources)}
    steps = _equalize(shares, room, free, missing=0)
    assert sum(steps.values()) == min(free, sum(room.values()))
    assert all(0 <= steps[name] <= room[name] for name in shares)
    open_shares = [shares[name] + steps[name] for name in shares if steps[name] < room[name]]
    highest = max((shares[name] + steps[name] for name in shares if steps[name]), default=0)
    # A share that can still grow is at most 1 below the highest share that grew.
    assert all(share >= highest - 1 for share in open_shares)
