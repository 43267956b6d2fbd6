"""Changes of the configuration when a run is resumed. A change is declared if an override sets its key or section."""

from __future__ import annotations

import pytest

from td3_robot.config import loading as configuration
from td3_robot.config import resume as changes
from td3_robot.config.schema import Config
from td3_robot.errors import UsageError


def config(*overrides: str) -> Config:
    return configuration.parse({}, overrides)


def test_differences_lists_the_changed_keys_by_their_full_names() -> None:
    after = config("robots=4", "learner.batch_size=128", "network.hidden=[5, 6]", "evaluation.target_return=900")
    assert changes.differences(Config(), after) == {
        "robots": (1, 4),
        "learner.batch_size": (256, 128),
        "network.hidden": ((400, 300), (5, 6)),
        "evaluation.target_return": (None, 900),
    }
    assert changes.differences(after, after) == {}


@pytest.mark.parametrize("declared", [{"learner.batch_size", "robots"}, {"learner", "robots", "seed"}])
def test_declared_changes_are_accepted_and_listed(declared: set[str]) -> None:
    after = config("robots=4", "learner.batch_size=128")
    assert changes.accepted(Config(), after, declared) == ["robots: 1 → 4", "learner.batch_size: 256 → 128"]


@pytest.mark.parametrize(
    ("overrides", "declared", "text"),
    [
        (
            ["learner.batch_size=128"],
            set(),
            r"is 256 in the run, 128 now; to accept the change, add --set learner\.batch_size=128; "
            r"in Python, use overrides$",
        ),
        (["learner.batch_size=128", "robots=2"], {"robots"}, "batch_size is 256 in the run"),
        (["learner.batch_size=128"], {"lear"}, "batch_size is 256 in the run"),
        (
            ["learner.precision=bf16"],
            {"learner.threads"},
            r'precision is "fp32" in the run, "bf16" now; to accept the change, add --set',
        ),
        (
            ["learner.threads=2"],
            set(),
            r"threads is 1 in the run, 2 now; to accept the change, add --set learner\.threads=2; "
            r"in Python, use overrides$",
        ),
        (["learner.device=cuda"], set(), r'learner\.device is "cpu" in the run, "cuda" now'),
        (["task=Ant"], {"task"}, 'task is "Walker2D" in the run and cannot become "Ant": the run.s policy'),
        (["seed=1"], {"seed"}, "seed is 0 in the run"),
        (["timing=lockstep"], {"timing"}, 'timing is "free"'),
        (["network.hidden=[5]"], {"network"}, r"hidden is \[400,300\] in the run and cannot become \[5\]"),
        (["learner.buffer_size=1000"], {"learner"}, "buffer_size is 1000000"),
        (["learner.replay_storage=file"], {"learner"}, 'replay_storage is "memory"'),
    ],
)
def test_undeclared_changes_and_changes_of_fixed_keys_are_refused(
    overrides: list[str], declared: set[str], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        changes.accepted(Config(), config(*overrides), declared)


def test_declared_changes_of_device_precision_and_threads_are_listed() -> None:
    after = config("learner.precision=bf16", "learner.threads=2", "learner.device=cuda")
    assert changes.accepted(Config(), after, {"learner.precision", "learner.threads", "learner.device"}) == [
        'learner.device: "cpu" → "cuda"',
        'learner.precision: "fp32" → "bf16"',
        "learner.threads: 1 → 2",
    ]


def test_lockstep_resumes_only_with_the_same_number_of_robots_and_simulators() -> None:
    lockstep = config("timing=lockstep")
    for key in ("robots", "simulators"):
        with pytest.raises(UsageError, match=f"{key} is 1 in the run and cannot become 2"):
            changes.accepted(lockstep, config("timing=lockstep", f"{key}=2"), {key})


def test_a_run_that_is_not_what_a_command_asks_for_is_described() -> None:
    asked = config("learner.batch_size=128", "learner.precision=bf16")
    assert changes.disagreements(Config(), asked) == [
        "learner.batch_size is 256 in the run, 128 now",
        'learner.precision is "fp32" in the run, "bf16" now',
    ]
    assert changes.disagreements(asked, asked) == []


@pytest.mark.parametrize(
    "override",
    [
        *("learner.precision=auto", "learner.threads=auto", "learner.device=auto"),
        *("learner.threads=2", "learner.compile=true", "cluster.wait_s=5", "endpoints.policy=ipc:///tmp/p"),
    ],
)
def test_keys_that_only_describe_the_machine_make_no_other_run(override: str) -> None:
    assert changes.disagreements(Config(), config(override)) == []
