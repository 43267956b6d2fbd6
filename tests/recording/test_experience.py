"""A learner gets the same transitions from a recording as in the live run. It refuses a recording of another robot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from td3_robot.bundle import Bundle
from td3_robot.cli.main import main
from td3_robot.config import loading as configuration
from td3_robot.core_types import Peer
from td3_robot.errors import BundleError, ConfigError, SessionError
from td3_robot.learner.core import LearnerCore
from td3_robot.learner.factory import make_core
from td3_robot.learner.warm_start import begin, prefill
from td3_robot.messages import Phase, Throttle, Weights
from td3_robot.recording import experience
from td3_robot.specs import RobotSpec
from td3_robot.transport import link as handshake
from tests.sessions import BEGIN, SECOND, Publisher, entries_of

Make = Callable[..., Any]
CONFIG = configuration.parse({"network": {"hidden": [4]}, "learner": {"learning_starts": 500}, "total_steps": 1000})


def steps(make_step: Make) -> list[Any]:
    """Steps of two robots with three episodes in total. Robot 0 terminates at Step 5. Step 8 is lost."""
    made = []
    for number in range(12):
        phase = Phase.FIRST if number in (0, 6) else Phase.TERMINATED if number == 5 else Phase.MID
        made.append(
            make_step(
                number,
                2,
                phase=np.array([phase, Phase.MID if number else Phase.FIRST], np.uint8),
                episode=np.array([number >= 6, 0], np.uint64),
                episode_step=np.array([number % 6, number], np.uint32),
                reward=np.array([number, -number], np.float32),
            )
        )
    return [step for step in made if step.sequence != 8]


def rows(core: LearnerCore) -> Any:
    return core.training.experience.replay.state()[0]["rows"]


def test_a_recording_gives_the_same_transitions_as_the_live_run(make_step: Make, spec: RobotSpec, save: Make) -> None:
    """Step 8 is lost, so each robot has a gap of two transitions.

    Robot 0 has 5 transitions in its first episode. In its second episode, it has 1 before the gap and 2 after the gap.
    Robot 1 has 7 before the gap and 2 after the gap.
    """
    hello = handshake.hello("simulator", "sim-0", client=0, robots=2, spec=spec)
    path = save("a.mcap", entries_of([("sim-0", item) for item in (hello, *steps(make_step))]))
    live, peer = make_core(CONFIG), Peer("learner", b"k", hello, {})
    live.step([(peer, hello)], 0.0)
    for step in steps(make_step):
        live.step([(peer, step)], 0.0)
    begun = make_core(CONFIG)
    assert prefill(begun, [experience.read(path)]) == [len(rows(live))] == [(5 + 1 + 2) + (7 + 2)]
    assert rows(begun).tobytes() == rows(live).tobytes()
    assert (begun.env_steps, begun.updates) == (0, 0)
    assert live.env_steps == 17


def test_the_parts_of_a_split_recording_count_as_one_recording(
    make_step: Make, spec: RobotSpec, tmp_path: Path, rng: Any
) -> None:
    """Three-step returns continue across the end of a part.

    The list of files has all parts and a second recording, in random order. The second recording stays separate.
    """
    hello = handshake.hello("simulator", "sim-0", client=0, robots=2, spec=spec)
    split, whole = Publisher(tmp_path / "a.mcap", split_s=0.3), Publisher(tmp_path / "whole.mcap")
    other = Publisher(tmp_path / "other.mcap", begin=BEGIN + SECOND)
    for it in (split, whole, other):
        it.publish(hello, *steps(make_step))
        it.recorder.close(it.now)
    parts = split.recorder.files
    assert len(parts) >= 3
    begun = []
    for files in ([*parts, *other.recorder.files], [*whole.recorder.files, *other.recorder.files]):
        names = [str(files[n]) for n in rng.permutation(len(files))]
        if files[0] in parts:
            ends = experience.recordings([Path(name) for name in names])
            assert sorted(map(len, ends)) == [1, len(parts)]
        config = {"network": {"hidden": [4]}, "learner": {"recordings": names, "n_step": 3}}
        core = make_core(configuration.parse(config))
        begin(core)
        begun.append(core)
    assert rows(begun[0]).tobytes() == rows(begun[1]).tobytes()
    assert len(rows(begun[0])) == 2 * ((5 + 1 + 2) + (7 + 2))


def test_a_robot_can_join_a_learner_that_started_from_recordings(make_step: Make, spec: RobotSpec) -> None:
    """The learner has weights before the robot joins, and counts no gap between recorded and live Steps."""
    core = make_core(CONFIG)
    prefill(core, [(spec, steps(make_step))])
    assert core.publisher.version == 1
    hello = handshake.hello("simulator", "sim-0", client=0, incarnation=3, robots=2, spec=spec)
    peer = Peer("learner", b"k", hello, {})
    core.step([(peer, hello)], 0.0)
    for number in range(3):
        core.step([(peer, make_step(number, 2, incarnation=3))], 0.0)
    assert core.env_steps == 4  # 3 Steps of 2 robots make (3 - 1) · 2 transitions
    assert core.counts()["gaps"] == 0


@pytest.mark.parametrize(("timing", "ratio"), [("free", 1.0), ("free", None), ("lockstep", 1.0)])
def test_offline_updates_run_before_the_first_environment_step(
    make_step: Make, spec: RobotSpec, save: Make, timing: str, ratio: float | None
) -> None:
    """After 5 updates, the learner lets the connected simulator start. Exploration uses the learned policy."""
    hello = handshake.hello("simulator", "sim-0", client=0, robots=2, spec=spec)
    path = save("a.mcap", entries_of([("sim-0", item) for item in (hello, *steps(make_step))]))
    learner = {"recordings": [str(path)], "offline_updates": 5, "learning_starts": 8, "replay_ratio": ratio}
    config = configuration.parse(
        {
            "network": {"hidden": [4]},
            "learner": {**learner, "publish_every": 1, "batch_size": 4},
            "timing": timing,
            "robots": 2,
            "total_steps": 10,
        }
    )
    core = make_core(config)
    begin(core)
    before = core.publisher.bundle()
    peer = Peer("learner", b"k", hello, {})
    server = Peer("learner", b"p", handshake.hello("policy", "policy", client=0), {})
    outputs = core.step([(peer, hello), (server, server.hello)], 0.0)
    for made in range(1, 5):
        assert (core.updates, core.env_steps, core.learning.offline, core.busy) == (made, 0, True, True)
        assert not any(isinstance(message, Throttle) for _, message in outputs)
        outputs = core.step([], 0.1 * made)
    assert (core.updates, core.learning.offline) == (5, False)
    (weights,) = (message for _, message in outputs if isinstance(message, Weights))
    assert weights.updates == 5
    learned = Bundle.decode(weights.payload)
    assert learned.exploration.kind == "gaussian_v2"
    assert any(not np.array_equal(learned.tensors[name], before.tensors[name]) for name in before.tensors)
    (throttle,) = (message for _, message in outputs if isinstance(message, Throttle))
    assert throttle.transitions_allowed > 0
    (record,) = core.reports.take()
    assert (record["kind"], record["updates"], record["env_steps"]) == ("offline", 5, 0)
    for _ in range(5):
        core.step([], 1.0)
    assert core.updates == 5  # later updates need environment steps


def test_offline_updates_without_a_transition_are_refused(make_step: Make, spec: RobotSpec, save: Make) -> None:
    hello = handshake.hello("simulator", "sim-0", client=0, robots=1, spec=spec)
    path = save("a.mcap", entries_of([("sim-0", item) for item in (hello, make_step(0))]))
    learner = {"recordings": [str(path)], "offline_updates": 5}
    with pytest.raises(SessionError, match=r"learner\.recordings .*a\.mcap: no transitions for the offline updates"):
        begin(make_core(configuration.parse({"network": {"hidden": [4]}, "learner": learner})))
    operated = make_step(1, operated={"0": "anna"})
    path = save("b.mcap", entries_of([("sim-0", item) for item in (hello, make_step(0), operated)]))
    learner = {"recordings": [str(path)], "offline_updates": 5, "operator_share": 0.5}
    with pytest.raises(SessionError, match=r"offline updates; operators chose all 1 actions, so set learner\."):
        begin(make_core(configuration.parse({"network": {"hidden": [4]}, "learner": learner})))
    with pytest.raises(ConfigError, match=r"learner\.offline_updates is 5 and learner\.recordings is empty"):
        configuration.parse({"learner": {"offline_updates": 5}})


def test_a_recording_of_another_robot_is_refused(
    make_step: Make, spec: RobotSpec, save: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hello = handshake.hello("simulator", "sim-0", client=0, robots=2, spec=spec)
    path = save("a.mcap", entries_of([("sim-0", item) for item in (hello, *steps(make_step))]))
    assert main(["train", "walker2d", "--out", str(tmp_path / "run"), "--from", str(path)]) == 2
    assert "is of another robot: robot is 'Walker2D' here, 'Toy' there" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    bare = save("b.mcap", entries_of([("sim-0", make_step(0))]))
    with pytest.raises(SessionError, match="does not describe its robot"):
        experience.read(bare)
    core = make_core(CONFIG)
    prefill(core, [(spec, [])])
    other = RobotSpec("Other", spec.observations, spec.actions, spec.control_period)
    with pytest.raises(BundleError, match="of another robot"):
        prefill(core, [(other, [])])
