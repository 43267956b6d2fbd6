"""Reading a configuration: values, overrides, and errors that name the key, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from td3_robot.config import loading as configuration
from td3_robot.config.schema import Config
from td3_robot.errors import ConfigError
from td3_robot.util import resources


def test_an_old_configuration_that_launches_a2c_gets_the_algorithm_a2c(caplog: pytest.LogCaptureFixture) -> None:
    """Version 0.1.0 wrote all keys into the configuration of a run, including keys that A2C did not read."""
    before = {"task": "discrete:CartPole-v1", "launch": "a2c", "timing": "free", "a2c": {"episodes": 7}}
    config = configuration.parse({**before, "learner": {"algorithm": "td3", "learning_starts": 25_000}})
    assert (config.launch, config.timing) == ("train", "lockstep")
    assert (config.learner.algorithm, config.learner.learning_starts, config.a2c.episodes) == ("a2c", 0, 7)
    [record] = caplog.records
    assert "replaced 'launch: a2c' with 'launch: train, learner.algorithm: a2c" in record.message
    caplog.clear()
    assert configuration.parse(before, ["seed=1"]).learner.algorithm == "a2c"
    assert len(caplog.records) == 1


def test_defaults_are_the_published_td3() -> None:
    """The values come from Fujimoto et al. 2018 and the authors' code."""
    learner = Config().learner
    assert (learner.batch_size, learner.learning_rate, learner.discount, learner.polyak) == (256, 3e-4, 0.99, 0.005)
    assert (learner.target_noise, learner.target_noise_clip, learner.policy_delay) == (0.2, 0.5, 2)
    assert (learner.buffer_size, learner.learning_starts, learner.replay_ratio) == (1_000_000, 25_000, 1.0)
    assert Config().exploration.noise == 0.1


@pytest.mark.parametrize("file", sorted(resources.folder("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(file: Path) -> None:
    assert configuration.load(file.stem) == configuration.load(file)


def test_a_configuration_written_as_yaml_and_read_again_is_equal() -> None:
    config = configuration.parse(
        {}, ["learner.replay_ratio=null", "network.hidden=[7, 8, 9]", "seed=5", "exploration.noise=[0.1, 0.4]"]
    )
    assert configuration.parse(yaml.safe_load(config.to_yaml())) == config


def test_ddpg_is_td3_without_its_three_additions() -> None:
    """``ddpg`` switches off twin critics, target noise and policy delay.

    With ``td3``, a configuration can switch off each of the three separately.
    """
    ddpg = configuration.parse({}, ["learner.algorithm=ddpg"])
    assert (ddpg.learner.twin_critics, ddpg.learner.target_noise, ddpg.learner.policy_delay) == (False, 0.0, 1)
    assert configuration.parse(yaml.safe_load(ddpg.to_yaml())) == ddpg
    for override in ("learner.twin_critics=false", "learner.target_noise=0", "learner.policy_delay=1"):
        assert configuration.parse({}, [override]).learner.algorithm == "td3"
        assert configuration.parse({}, ["learner.algorithm=ddpg", override]) == ddpg


def test_lap_implies_the_huber_loss() -> None:
    assert configuration.parse({}, ["learner.replay=lap"]).learner.critic_loss == "huber"
    assert configuration.parse({}, ["learner.critic_loss=huber"]).learner.replay == "uniform"


def test_an_override_gets_the_type_of_its_key() -> None:
    config = configuration.parse(
        {"learner": {"batch_size": 8}}, ["learner.batch_size=9", "learner.learning_rate=3e-4", "timing=lockstep"]
    )
    assert config.learner.batch_size == 9
    assert config.learner.learning_rate == 3e-4  # YAML 1.1 reads 3e-4 as text
    assert config.timing == "lockstep"


def test_a_map_for_a_section_changes_only_the_keys_in_the_map() -> None:
    """A section can be inside a section. If the section has only its default values, the map adds keys to it."""
    content = {
        "learner": {"learning_rate": 0.5, "discount": 0.9},
        "randomization": {"mass": [1, 2], "push": {"force": [3, 4], "interval": [5, 6]}},
    }
    overrides = [
        "learner={batch_size: 32, discount: 0.8}",
        "randomization={tilt: [0, 1], push: {force: [0, 1]}, sensor_bias: {all: [0, 2]}}",
        "safety={hang_ms: 5}",
    ]
    config = configuration.parse(content, overrides)
    learner, randomization = config.learner, config.randomization
    assert (learner.learning_rate, learner.discount, learner.batch_size) == (0.5, 0.8, 32)
    assert (randomization.mass, randomization.tilt, randomization.sensor_bias.all) == ((1, 2), (0, 1), (0, 2))
    assert (randomization.push.force, randomization.push.interval) == ((0, 1), (5, 6))
    assert config.safety.hang_ms == 5
    assert configuration.parse({"record": True}, ["record={ring_s: 9}"]).record.enabled


def test_a_map_that_is_a_value_replaces_the_value() -> None:
    """The keys of these maps are names that the user chooses."""
    content = {"safety": {"limits": {"left": [0, 1]}, "hang_ms": 5}, "cluster": {"addresses": {"a": "b"}}}
    for override in ("safety.limits={right: [2, 3]}", "safety={limits: {right: [2, 3]}}"):
        safety = configuration.parse(content, [override]).safety
        assert (safety.limits, safety.hang_ms) == ({"right": (2, 3)}, 5)
    assert configuration.parse(content, ["cluster={addresses: {c: d}}"]).cluster.addresses == {"c": "d"}


def test_an_error_in_a_map_for_a_section_names_the_override() -> None:
    with pytest.raises(
        ConfigError, match=r"^--set learner=\{batchsize: 3\}: unknown key 'learner\.batchsize'; did you"
    ):
        configuration.parse({"learner": {"threads": 2}}, ["learner={batchsize: 3}"])
    with pytest.raises(ConfigError, match=r"learner is 5; it must be a map of keys"):
        configuration.parse({"learner": {"threads": 2}}, ["learner=5"])


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("learner.batch_size=3", ["learner.batch_size"]),
        ("learner={batch_size: 3, threads: 2}", ["learner.batch_size", "learner.threads"]),
        ("randomization={push: {force: [1, 2]}, tilt: null}", ["randomization.push.force", "randomization.tilt"]),
        ("safety.limits={left: [0, 1]}", ["safety.limits"]),
        ("record=true", ["record.enabled"]),
        ("bogus={a: 1}", ["bogus"]),
        ("learner={", ["learner"]),
    ],
)
def test_an_override_sets_these_keys(override: str, keys: list[str]) -> None:
    assert configuration.keys_of(override) == keys


def test_numbers_with_exponents_are_read_as_in_json(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("{total_steps: 1E+5, learner: {learning_rate: 1e-3, discount: 98e-2}, robots: 2.0}")
    config = configuration.load(str(file), ["exploration.noise=[1e-2, 5e-1]", "learner.buffer_size=1e5"])
    assert (config.total_steps, config.learner.buffer_size, config.robots) == (100_000, 100_000, 2)
    assert (config.learner.learning_rate, config.learner.discount) == (0.001, 0.98)
    assert config.exploration.noise == (0.01, 0.5)
    with pytest.raises(ConfigError, match=r"learner.batch_size is 1.5; it must be a whole number"):
        configuration.load(str(file), ["learner.batch_size=15e-1"])


@pytest.mark.parametrize(
    ("content", "overrides", "words"),
    [
        ({"tusk": "Ant"}, [], ["unknown key 'tusk'", "did you mean 'task'"]),
        ({"learner": {"batchsize": 3}}, [], ["unknown key 'learner.batchsize'", "did you mean 'batch_size'"]),
        ({"batch_size": 3}, [], ["unknown key 'batch_size'", "did you mean 'learner.batch_size'"]),
        ({"zzz": 1}, [], ["unknown key 'zzz'", "known keys: task, seed"]),
        ({"learner": 3}, [], ["learner is 3", "map of keys"]),
        ([1], [], ["list"]),
        ({}, ["learner.batch_size=many"], ["learner.batch_size is 'many'", "must be a whole number"]),
        ({}, ["learner.batch_size=0"], ["learner.batch_size is 0", ">= 1"]),
        ({}, ["learner.discount=1.5"], ["learner.discount is 1.5", "<= 1"]),
        ({}, ["timing=fast"], ["timing is 'fast'"]),
        ({}, ["network.hidden=[]"], ["network.hidden is []"]),
        ({}, ["seed=-1"], ["seed is -1"]),
        ({}, ["batch_size"], ["'batch_size'", "KEY=VALUE"]),
        ({}, ["task.name=x"], ["task is {'name': 'x'}", "it must be text"]),
        ({"task": "Ant"}, ["task.name=x"], ["'task' is a value"]),
        ({}, ["x=[1"], ["not YAML"]),
        ({}, ["total_steps=100"], ["learner.learning_starts is 25000", "total_steps is 100"]),
        ({}, ["learner.batch_size=10", "learner.buffer_size=5"], ["batch_size is 10", "buffer_size 5"]),
        ({}, ["robots=8", "learner.replay_ratio_band=7"], ["replay_ratio_band is 7", "at least 9"]),
        ({}, ["timing=lockstep", "learner.replay_ratio=null"], ["lockstep", "needs a ratio"]),
        (
            {},
            ["learner.algorithm=ddpg", "learner.twin_critics=true"],
            ["learner.algorithm is 'ddpg'", "learner.twin_critics is True", "must be False"],
        ),
        ({}, ["learner.algorithm=ddpg", "learner.policy_delay=2"], ["learner.policy_delay is 2", "must be 1"]),
        ({}, ["learner.algorithm=ddpg", "learner.target_noise=0.2"], ["learner.target_noise is 0.2", "must be 0.0"]),
        ({}, ["learner.replay=lap", "learner.critic_loss=mse"], ["learner.critic_loss is 'mse'", "must be 'huber'"]),
        ({}, ["learner.gradient_clip=0"], ["learner.gradient_clip is 0"]),
        ({}, ["learner.n_step=0"], ["learner.n_step is 0", ">= 1"]),
        ({}, ["learner.operator_share=1"], ["learner.operator_share is 1", "< 1"]),
        (
            {},
            ["learner.operator_share=0.5", "learner.learn_from_operator=false"],
            ["learner.operator_share is 0.5", "learner.learn_from_operator is false", "allowed for operator_share: 0"],
        ),
        (
            {},
            ["learner.n_step=3", "learner.learning_starts=23", "robots=8"],
            ["learner.learning_starts is 23", "n_step 3", "at least 24"],
        ),
        ({}, ["exploration.noise=[0.4, 0.1]"], ["exploration.noise is [0.4, 0.1]", "the lower one first"]),
        ({}, ["exploration.noise=-1"], ["exploration.noise is -1.0", "from 0 to 1e12"]),
        ({}, ["exploration.noise=[-1, 1]"], ["exploration.noise is [-1.0, 1.0]", "from 0 to 1e12"]),
        ({}, ["exploration.noise=.nan"], ["exploration.noise is nan", "from 0 to 1e12"]),
        ({}, ["exploration.noise=much"], ["exploration.noise is 'much'"]),
        ({}, ["exploration.theta=0"], ["exploration.theta is 0", ">= 0.01"]),
        ({}, ["exploration.kind=pink"], ["exploration.kind is 'pink'", "allowed: gaussian, ornstein_uhlenbeck, gauss"]),
        ({}, ["pacing.mode=slow"], ["pacing.mode is 'slow'"]),
        ({}, ["pacing.fallback=brake"], ["pacing.fallback is 'brake'"]),
        ({}, ["timing=lockstep", "pacing.mode=realtime"], ["pacing.mode is 'realtime'", "timing is 'lockstep'"]),
        ({}, ["randomization.mas=[1, 2]"], ["unknown key 'randomization.mas'", "did you mean 'mass'"]),
        ({}, ["randomization.push.forse=[1, 2]"], ["'randomization.push.forse'", "did you mean 'force'"]),
        ({}, ["randomization.mass=[2, 1]"], ["randomization.mass is [2.0, 1.0]", "lower one first"]),
        ({}, ["randomization.mass=[0, 1]"], ["randomization.mass[0] is 0", "> 0"]),
        ({}, ["randomization.friction=0.5"], ["randomization.friction is 0.5"]),
        ({}, ["randomization.tilt=[0, 2]"], ["randomization.tilt[1] is 2", "<= 1"]),
        ({}, ["randomization.action_latency=[0, 1.5]"], ["randomization.action_latency[1]", "a whole number"]),
        ({}, ["randomization.sensor_bias.height=[0, .inf]"], ["randomization.sensor_bias.height", "finite"]),
        ({}, ["randomization.sensor_noise.height=[-1, 1]"], ["sensor_noise.height is [-1.0, 1.0]", "at least 0"]),
        ({}, ["randomization.push.duration=[1, 3]"], ["push.duration is [1.0, 3.0]", "push.interval, 2.0 s"]),
    ],
)
def test_errors_name_the_key_the_value_and_what_is_allowed(
    content: object, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.parse(content, overrides)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_files_that_cannot_be_read_or_parsed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file 'walker3d'; similar shipped files in configs: walker2d"):
        configuration.load("walker3d")
    (tmp_path / "bad.yaml").write_text("a: [1\nb: 2")
    with pytest.raises(ConfigError, match="is not YAML"):
        configuration.load(tmp_path / "bad.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        configuration.load(tmp_path / "binary.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert configuration.load(tmp_path / "empty.yaml") == Config()


def test_reading_a_configuration_gives_plain_values_and_runs_no_code(tmp_path: Path) -> None:
    """PyYAML's unsafe loaders would call the function in the tag ``!!python/object/apply``."""
    mark = tmp_path / "it-ran"
    (tmp_path / "evil.yaml").write_text(f"seed: !!python/object/apply:os.mkdir [{mark}]\n")
    with pytest.raises(ConfigError, match="is not YAML: could not determine a constructor for the tag"):
        configuration.load(tmp_path / "evil.yaml")
    assert not mark.exists()


def test_all_keys_of_the_agreement_are_keys_of_the_configuration() -> None:
    """The agreement has the keys whose values must be the same in all processes of a run."""
    for key in Config().agreement():
        value: object = Config()
        for part in key.split("."):
            assert isinstance(value, msgspec.Struct)
            value = getattr(value, part)


def test_record_true_stands_for_a_whole_section() -> None:
    """``record: true`` means ``record: {enabled: true}``."""
    assert configuration.parse({"record": True}).record.enabled
    assert not configuration.parse({"record": {"enabled": True}}, ["record=false"]).record.enabled
    assert configuration.parse({"record": {"enabled": True, "ring_s": 30}}).record.ring_s == 30
    with pytest.raises(ConfigError, match=r"record\.ring_s is -1"):
        configuration.parse({"record": {"ring_s": -1}})
    with pytest.raises(ConfigError, match=r"^test: record is 'maybe'; it must be true, false or a map of keys$"):
        configuration.parse({"record": "maybe"}, source="test")


@pytest.mark.parametrize("order", [1, -1])
def test_record_true_keeps_the_other_keys_of_the_section_record(order: int) -> None:
    record = configuration.parse({}, ["record=true", "record.weights_every=100"][::order]).record
    assert (record.enabled, record.weights_every) == (True, 100)
    record = configuration.parse({"record": True}, ["record.weights_every=0", "record=false"][::order]).record
    assert (record.enabled, record.weights_every) == (False, 0)
    with pytest.raises(ConfigError, match=r"record\.weights_every is -1"):
        configuration.parse({}, ["record=true", "record.weights_every=-1"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("safety: {hang_ms: 5}\npolicy: {}\nsafety: {rate: 1}\n", "line 3: the key 'safety' appears twice in one map"),
        ("learner:\n  threads: 1\n  threads: 2\n", "line 3: the key 'threads' appears twice in one map"),
        ("safety: {limits: {left: [0, 1], 'left': [0, 2]}}", "line 1: the key 'left' appears twice in one map"),
    ],
)
def test_a_duplicate_key_is_refused(text: str, words: str, tmp_path: Path) -> None:
    """PyYAML would keep only the last value, without a warning. So safety limits could be lost."""
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        configuration.load(tmp_path / "c.yaml")


def test_a_key_in_a_map_overrides_the_key_that_a_yaml_merge_brings_in(tmp_path: Path) -> None:
    text = "network: {hidden: [8]}\nlearner: {<<: {threads: 3, n_step: 2}, threads: 2}\n"
    (tmp_path / "c.yaml").write_text(text)
    loaded = configuration.load(tmp_path / "c.yaml")
    assert (loaded.learner.threads, loaded.learner.n_step) == (2, 2)


@pytest.mark.parametrize(
    ("safety", "words"),
    [
        ({"safe_action": "Zero"}, "safety.safe_action is 'Zero': invalid enum value 'Zero'; allowed: hold, zero"),
        ({"recovery": "auto"}, "safety.recovery is 'auto': invalid enum value 'auto'; allowed: manual, automatic"),
    ],
)
def test_the_error_for_a_wrong_choice_lists_the_allowed_values(safety: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configuration.parse({"safety": safety})


def test_an_algorithm_of_a_package_that_is_not_installed_is_accepted() -> None:
    """A policy server on a robot reads the training's configuration, but does not need the algorithm's package."""
    assert configuration.parse({}, ["learner.algorithm=sac"]).learner.algorithm == "sac"


def test_an_error_about_a_key_of_the_file_does_not_name_an_override_of_its_section() -> None:
    with pytest.raises(ConfigError, match=r"^run\.yaml: learner\.batch_size is -1"):
        configuration.parse({"learner": {"batch_size": -1}}, ["learner={discount: 0.9}"], source="run.yaml")
    with pytest.raises(ConfigError, match=r"^--set learner=\{batch_size: -1\}: learner\.batch_size is -1"):
        configuration.parse({"learner": {"discount": 0.9}}, ["learner={batch_size: -1}"], source="run.yaml")
