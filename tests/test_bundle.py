"""Policy bundles: a saved bundle loads unchanged. Damaged, hostile or unsuitable bytes raise BundleError."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, note, settings
from hypothesis import strategies as st

from td3_robot import bundle as bundles
from td3_robot.bundle import Bundle, Exploration, layer_shapes
from td3_robot.errors import BundleError
from td3_robot.safety.limits import SafetyConfig
from td3_robot.specs import Channel, RobotSpec

Make = Callable[..., Bundle]


def taken_apart(payload: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Split a bundle into its header without metadata; the metadata of td3_robot; and the bytes of its tensors."""
    length = int.from_bytes(payload[:8], "little")
    tensors = json.loads(payload[8 : 8 + length])
    ours = json.loads(tensors.pop("__metadata__")["td3_robot"])
    return tensors, ours, payload[8 + length :]


def put_together(tensors: Any, ours: Any, data: bytes) -> bytes:
    """Join the parts that ``taken_apart`` returns."""
    text = json.dumps({"__metadata__": {"td3_robot": json.dumps(ours)}, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def reason(payload: bytes) -> str:
    """Check that decode() refuses these bytes with a short error of one line. Return the text of the error."""
    with pytest.raises(BundleError) as caught:
        Bundle.decode(payload, "weights version 7")
    text = str(caught.value)
    assert text.startswith("weights version 7: ")
    assert "\n" not in text
    assert len(text) < 2000
    return text


def assert_same(one: Bundle, other: Bundle) -> None:
    assert (one.spec, one.hidden, one.exploration) == (other.spec, other.hidden, other.exploration)
    assert dict(one.provenance) == dict(other.provenance)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert other.tensors[name].dtype == np.float32
        assert np.array_equal(tensor, other.tensors[name])


@pytest.mark.parametrize("exploration", [("none", 0.0), ("gaussian", 0.1), ("uniform", 0.0)])
@pytest.mark.parametrize("hidden", [(), (1,), (8, 4), (3, 5, 7)])
def test_a_decoded_bundle_equals_the_encoded_one(
    make_bundle: Make, hidden: tuple[int, ...], exploration: tuple[Any, float]
) -> None:
    original = replace(
        make_bundle(1, *exploration, hidden), provenance={"version": 3, "config": "a: é\n", "nested": {"x": [1, None]}}
    )
    payload = original.encode()
    assert_same(Bundle.decode(payload), original)
    assert Bundle.decode(payload).encode() == payload
    assert original.encode() == payload  # equal bundles need equal bytes, because Weights carry the hash of the bytes


def test_unbounded_observations_stay_unbounded(spec: RobotSpec) -> None:
    free = replace(spec, observations=(Channel("x", "m", float("-inf"), float("inf")),))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in layer_shapes(free, (2,)).items()}
    assert Bundle.decode(Bundle(free, (2,), tensors).encode()).spec == free


def test_layer_shapes_are_outputs_by_inputs(spec: RobotSpec) -> None:
    assert layer_shapes(spec, (8, 4)) == {
        "actor.0.weight": (8, 3),
        "actor.0.bias": (8,),
        "actor.1.weight": (4, 8),
        "actor.1.bias": (4,),
        "actor.2.weight": (2, 4),
        "actor.2.bias": (2,),
    }


def test_tensors_in_fortran_order_are_stored_in_c_order(make_bundle: Make) -> None:
    original = make_bundle()
    turned = {name: np.asfortranarray(tensor) for name, tensor in original.tensors.items()}
    assert replace(original, tensors=turned).encode() == original.encode()


# -- damage ----------------------------------------------------------------------------------------------------------


def test_a_bundle_with_missing_or_additional_bytes_is_refused(make_bundle: Make) -> None:
    payload = make_bundle().encode()
    for end in range(0, len(payload), 97):
        reason(payload[:end])
    reason(payload[:-1])
    reason(payload + b"\0")


def test_bundle_with_a_changed_byte_is_refused_or_still_fits_its_header(make_bundle: Make) -> None:
    """If decode() accepts the bundle, its values are finite and its shapes fit.

    Only a hash can detect the changed byte of such a bundle.
    """
    payload = make_bundle().encode()
    for position in range(0, len(payload), 97):
        for value in (0x00, 0x7F, 0xFF, payload[position] ^ 1):
            damaged = bytearray(payload)
            damaged[position] = value
            try:
                result = Bundle.decode(bytes(damaged), "weights version 7")
            except BundleError:
                continue
            assert {name: item.shape for name, item in result.tensors.items()} == layer_shapes(
                result.spec, result.hidden
            )
            assert all(np.isfinite(item).all() for item in result.tensors.values())


@settings(max_examples=300, deadline=None, print_blob=True)
@given(payload=st.binary(max_size=200))
def test_random_bytes_are_refused(payload: bytes) -> None:
    note(payload.hex())
    reason(payload)
    reason(len(payload).to_bytes(8, "little") + payload)


@pytest.mark.parametrize("length", [0, 1, 2**22 + 1, 2**32, 2**63, 2**64 - 1])
def test_wrong_header_length_is_refused(make_bundle: Make, length: int) -> None:
    payload = make_bundle().encode()
    assert reason(length.to_bytes(8, "little") + payload[8:]) == "weights version 7: not a safetensors file"


@pytest.mark.parametrize(
    "header",
    [b"[]", b"{}", b"null", b'"x"', b'{"__metadata__":3}', b'{"__metadata__":{"td3_robot":3}}', b"[" * 100_000],
)
def test_header_without_td3_robot_metadata_is_refused(header: bytes) -> None:
    text = reason(len(header).to_bytes(8, "little") + header)
    assert text == "weights version 7: the file has no td3_robot header"


def test_other_safetensors_files_are_not_policies() -> None:
    assert "has no td3_robot header" in reason(safetensors.numpy.save({"a": np.zeros(3, np.float32)}))
    text = reason(safetensors.numpy.save({"a": np.zeros(3, np.float32)}, metadata={"td3_robot": "[1]"}))
    assert text == "weights version 7: its td3_robot header is not a map"


# -- hostile ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, "1", None, "x" * 10_000])
def test_another_format_version_is_reported_before_missing_keys(make_bundle: Make, version: Any) -> None:
    _, ours, _ = taken_apart(make_bundle().encode())
    # The header of an unknown format may lack all other keys.
    text = reason(put_together({}, {"format": version, "layers": ours["hidden"]}, b""))
    assert f"bundle format {str(version)[:40]!r}; this version reads format 1" in text


@pytest.mark.parametrize("key", ["format", "spec", "hidden", "exploration", "provenance"])
@pytest.mark.parametrize("value", ["missing", None, [], ["x"], {}, "text", -1, 10**400, float("inf"), float("nan")])
def test_wrong_header_value_is_refused(make_bundle: Make, key: str, value: Any) -> None:
    tensors, ours, data = taken_apart(make_bundle().encode())
    if value == "missing":
        del ours[key]
    else:
        ours[key] = value
    if key == "provenance" and value == {}:
        assert Bundle.decode(put_together(tensors, ours, data)).provenance == {}
    else:
        reason(put_together(tensors, ours, data))


@pytest.mark.parametrize("version", [-1, 2**63, 10**400, 1.0, True, "x", None, []])
def test_wrong_version_is_refused(make_bundle: Make, version: Any) -> None:
    text = reason(replace(make_bundle(), provenance={"version": version}).encode())
    shown = repr(version)[:40]
    assert text.endswith(f"provenance.version is {shown}; allowed: a whole number from 0 to {2**63 - 1}")


@pytest.mark.parametrize("version", [0, 2**63 - 1])
def test_right_version_is_read(make_bundle: Make, version: int) -> None:
    assert Bundle.decode(replace(make_bundle(), provenance={"version": version}).encode()).version == version
    assert Bundle.decode(replace(make_bundle(), provenance={}).encode()).version == 0


@pytest.mark.parametrize(
    "hidden",
    [[8], [8, 4, 2], [4, 8], [8, 5], [8, 0], [8, -4], [0, 0], [8, 1 << 17], [8, 10**30], [8, float("inf")], [4] * 1000],
)
def test_layer_sizes_that_do_not_fit_the_tensors_are_refused(make_bundle: Make, hidden: list[Any]) -> None:
    tensors, ours, data = taken_apart(make_bundle().encode())
    reason(put_together(tensors, {**ours, "hidden": hidden}, data))


@pytest.mark.parametrize(
    "exploration",
    [
        {"kind": "ornstein-uhlenbeck", "scale": 0.1},
        {"kind": "", "scale": 0.0},
        {"kind": [], "scale": 0.0},
        {"kind": "gaussian"},
        {"kind": "gaussian", "scale": -0.1},
        {"kind": "gaussian", "scale": float("nan")},
        {"kind": "gaussian", "scale": float("inf")},
        {"kind": "gaussian", "scale": 10**400},
        {"kind": "gaussian", "scale": "big"},
        {"kind": "gaussian", "scale": [0.1]},
        {"kind": "gaussian", "scale": [0.2, 0.1]},
        {"kind": "gaussian", "scale": [-0.1, 0.1]},
        {"kind": "gaussian", "scale": [0.1, "big"]},
        {"kind": "gaussian", "scale": [0.1, float("nan")]},
        {"kind": "ornstein_uhlenbeck", "scale": 0.1},
        {"kind": "ornstein_uhlenbeck", "scale": 0.1, "theta": 0},
        {"kind": "ornstein_uhlenbeck", "scale": 0.1, "theta": 2},
        {"kind": "ornstein_uhlenbeck", "scale": 0.1, "theta": float("nan")},
        {"kind": "ornstein_uhlenbeck", "scale": 0.1, "theta": "slow"},
        {"scale": 0.1},
    ],
)
def test_wrong_exploration_is_refused(make_bundle: Make, exploration: Any) -> None:
    tensors, ours, data = taken_apart(make_bundle().encode())
    reason(put_together(tensors, {**ours, "exploration": exploration}, data))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"control_period": 0}, "control_period is 0.0; it must be a finite number above 0 s"),
        ({"control_period": 10**400}, "damaged policy bundle"),
        ({"control_period": "soon"}, "damaged policy bundle"),
        ({"observations": []}, "it has no observation channel"),
        (
            {"actions": [{"name": "a", "unit": "N", "low": 0, "high": float("inf")}]},
            "actions need finite float32 limits",
        ),
        ({"actions": [{"name": "a", "unit": "N", "low": 1, "high": 0}]}, "low must be below high"),
        ({"actions": [{"name": "a", "unit": "N", "low": 0, "high": 1}]}, "actor.2.weight is float32[2, 4], needed is"),
    ],
)
def test_wrong_specification_is_refused(make_bundle: Make, change: dict[str, Any], text: str) -> None:
    tensors, ours, data = taken_apart(make_bundle().encode())
    assert text in reason(put_together(tensors, {**ours, "spec": {**ours["spec"], **change}}, data))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(make_bundle: Make, value: float) -> None:
    original = make_bundle()
    original.tensors["actor.1.weight"][2, 3] = value
    assert "actor.1.weight holds values that are not finite" in reason(original.encode())


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "int8", "bool", "uint64"])
def test_wrong_dtype_is_refused(make_bundle: Make, dtype: str) -> None:
    original = make_bundle()
    tensors: dict[str, Any] = {**original.tensors, "actor.0.bias": np.zeros(8, dtype)}
    text = reason(replace(original, tensors=tensors).encode())
    assert f"actor.0.bias is {dtype}[8], needed is float32[8]" in text


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F4", "C64", "E8M0", "F32 ", "f32", "X", None, 1])
def test_dtype_name_other_than_f32_is_refused(make_bundle: Make, dtype: Any) -> None:
    tensors, ours, data = taken_apart(make_bundle().encode())
    tensors["actor.0.bias"]["dtype"] = dtype
    reason(put_together(tensors, ours, data))


@pytest.mark.parametrize("shape", [[4], [9], [8, 1], [2, 4], [], [0], [-8], [8.5], [2**62, 8], [2**64], "8", None])
def test_wrong_shape_is_refused(make_bundle: Make, shape: Any) -> None:
    tensors, ours, data = taken_apart(make_bundle().encode())
    tensors["actor.0.bias"]["shape"] = shape
    reason(put_together(tensors, ours, data))


@pytest.mark.parametrize("offsets", [[0, 2**63], [32, 0], [-1, 31], [16, 48], [0], [0, 0], [2**64 - 8, 2**64 + 24]])
def test_wrong_offsets_are_refused(make_bundle: Make, offsets: list[int]) -> None:
    tensors, ours, data = taken_apart(make_bundle().encode())
    tensors["actor.0.bias"]["data_offsets"] = offsets
    reason(put_together(tensors, ours, data))


def test_missing_and_additional_tensors_are_refused(make_bundle: Make) -> None:
    original = make_bundle()
    more = {**original.tensors, "critic.0.weight": np.zeros((2, 2), np.float32)}
    assert "its tensors are" in reason(replace(original, tensors=more).encode())
    fewer = {name: tensor for name, tensor in original.tensors.items() if name != "actor.2.bias"}
    assert "its tensors are" in reason(replace(original, tensors=fewer).encode())
    assert "its tensors are" in reason(replace(original, tensors={}).encode())


def normalised(bundle: Bundle) -> Bundle:
    more = {
        "observation.mean": np.array([1, -2, 0], np.float32),
        "observation.std": np.array([0.5, 2, 1e-4], np.float32),
    }
    return replace(bundle, tensors={**bundle.tensors, **more})


def test_bundle_keeps_normalisation(make_bundle: Make) -> None:
    original = normalised(make_bundle())
    assert_same(Bundle.decode(original.encode()), original)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("observation.mean", None, "its tensors are"),
        ("observation.std", None, "its tensors are"),
        ("observation.mean", [1, 2], "observation.mean is float32[2], needed is float32[3]"),
        ("observation.std", [1, 1, 1, 1], "observation.std is float32[4]"),
        ("observation.mean", [1, np.nan, 1], "observation.mean holds values that are not finite"),
        ("observation.std", [1, np.inf, 1], "observation.std holds values that are not finite"),
        ("observation.std", [1, 0, 1], "the lowest observation.std is 0.0; allowed: above 0"),
        ("observation.std", [1, -2, 1], "the lowest observation.std is -2.0; allowed: above 0"),
    ],
)
def test_wrong_normalisation_is_refused(make_bundle: Make, name: str, value: Any, text: str) -> None:
    original = normalised(make_bundle())
    tensors = {key: tensor for key, tensor in original.tensors.items() if key != name or value is not None}
    if value is not None:
        tensors[name] = np.array(value, np.float32)
    assert text in reason(replace(original, tensors=tensors).encode())


# -- files -----------------------------------------------------------------------------------------------------------


def test_save_replaces_the_file_that_load_reads(make_bundle: Make, tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    first, second = make_bundle(1), make_bundle(2)
    first.save(path)
    assert_same(Bundle.load(path), first)
    second.save(path)
    assert_same(Bundle.load(path), second)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_failed_save_leaves_the_old_file_and_nothing_else(
    make_bundle: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "policy.safetensors"
    first = make_bundle(1)
    first.save(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, broken, full)
        with pytest.raises(OSError, match="No space left"):
            make_bundle(2).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert_same(Bundle.load(path), first)


def test_save_into_a_missing_folder_raises_and_creates_nothing(make_bundle: Make, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_bundle().save(tmp_path / "missing" / "policy.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_load_contains_the_path_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    with pytest.raises(BundleError, match=r"policy '.*policy.safetensors' cannot be read: No such file or directory"):
        Bundle.load(path)
    with pytest.raises(BundleError, match="cannot be read: Is a directory"):
        Bundle.load(tmp_path)
    path.write_bytes(b"not a policy")
    with pytest.raises(BundleError, match=r"policy '.*policy.safetensors': not a safetensors file"):
        Bundle.load(path)


def test_the_hash_is_sha256_in_hexadecimal() -> None:
    assert bundles.sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    "exploration",
    [
        Exploration("gaussian", (0.05, 0.4)),
        Exploration("ornstein_uhlenbeck", 0.2, {"theta": 0.3}),
        Exploration("ornstein_uhlenbeck", (0.1, 0.1)),
    ],
)
def test_bundle_keeps_exploration(make_bundle: Make, exploration: Exploration) -> None:
    original = replace(make_bundle(), exploration=exploration)
    assert_same(Bundle.decode(original.encode()), original)


def test_exploration_defaults_to_none() -> None:
    assert Exploration() == Exploration("none", 0.0)


def test_bundle_keeps_safety_settings(make_bundle: Make) -> None:
    settings = SafetyConfig(limits={"left": (0.0, 1.0)}, rate=5.0, safe_action="zero", observation_deadline_ms=100)
    bundle = replace(make_bundle(), safety=settings)
    assert Bundle.decode(bundle.encode()).safety == settings
    assert b"safety" not in make_bundle().encode()  # without safety settings, the header has no key ``safety``


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "safety"),
        ({"rate": -1.0}, "rate"),
        ({"speed": 1.0}, "speed"),
        ({"limits": {"up": [0.0, 1.0]}}, "no action 'up'"),
        ({"limits": {"left": [-9.0, 1.0]}}, "inside the specification's"),
        ({"safe_action": {"left": 9.0}}, "allowed: -1.0 to 3.0"),
    ],
)
def test_wrong_safety_settings_are_refused(make_bundle: Make, settings: Any, words: str) -> None:
    tensors, ours, data = taken_apart(make_bundle().encode())
    assert words in reason(put_together(tensors, {**ours, "safety": settings}, data))
