"""The comparison finds every kind of changed message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from td3_robot.messages import Action, Latches, Message, Step, Weights, wire_fields
from td3_robot.replay.compare import Comparison, compare, plot

Make = Callable[..., Any]


def actions(count: int = 10) -> list[Message]:
    rng = np.random.default_rng(0)
    return [
        Action("sim-0", 0, number, 0, rng.normal(size=(2, 2)).astype(np.float32), 1, 1, 7) for number in range(count)
    ]


def changed(messages: list[Message], at: int, **fields: Any) -> list[Message]:
    return [replace(item, **fields) if number == at else item for number, item in enumerate(messages)]


def with_action(messages: list[Message], at: int, value: float) -> list[Message]:
    array = messages[at].action.copy()  # type: ignore[attr-defined]
    array[1, 0] = value
    return changed(messages, at, action=array)


def both(expected: list[Message], got: list[Message], topic: str = "action") -> tuple[Comparison, Comparison]:
    return compare(topic, expected, got, exact=True), compare(topic, expected, got, exact=False)


def test_equal_messages_compare_as_equal() -> None:
    for result in both(actions(), actions()):
        assert result.same
        assert result.compared == 10
        assert result.worst() is None


def test_a_changed_value_is_found_and_located() -> None:
    value = actions()[4].action[1, 0].item()  # type: ignore[attr-defined]
    for result in both(actions(), with_action(actions(), 4, value + 0.5)):
        assert result.counts == {"action": 1}
        first = result.first[0]
        assert (first.message, first.field) == ("sim-0 0 4", "action[robot 1, channel 0]")
        assert float(first.expected) == value
        assert float(first.got) == pytest.approx(value + 0.5)
        assert result.worst() == "action"
        assert result.errors["action"][4] == pytest.approx(0.5)


def test_a_change_below_the_tolerance_counts_only_in_exact_mode() -> None:
    """The tolerance of ``Action.action`` is 1e-5 · (1 + |value|), so it is 1.5e-5 for the value 0.5."""
    assert wire_fields(Action)["action"].tolerance == 1e-5
    for error, same in ((0.5e-5, True), (4e-5, False)):
        exact, near = both(with_action(actions(), 4, 0.5), with_action(actions(), 4, 0.5 + error))
        assert not exact.same
        assert near.same is same


def test_exact_mode_finds_the_smallest_change_and_a_changed_sign_of_zero() -> None:
    for one, other in ((np.float32(0.5), np.nextafter(np.float32(0.5), np.float32(1))), (0.0, -0.0)):
        exact, near = both(with_action(actions(), 4, float(one)), with_action(actions(), 4, float(other)))
        assert exact.counts == {"action": 1}
        assert near.same
        assert exact.worst() == "action"


def test_nan_is_found() -> None:
    for result in both(actions(), with_action(actions(), 4, float("nan"))):
        assert result.counts == {"action": 1}
        assert result.first[0].got == "nan"
        assert result.errors["action"][4] == np.inf
    for result in both(with_action(actions(), 4, float("nan")), actions()):
        assert result.counts == {"action": 1}
    for result in both(with_action(actions(), 4, float("nan")), with_action(actions(), 4, float("nan"))):
        assert result.same


def test_infinity_is_found() -> None:
    """Infinity equals only infinity with the same sign. An infinite expected value does not allow every error."""
    infinite, other = with_action(actions(), 4, float("inf")), with_action(actions(), 4, float("-inf"))
    for expected, got in ((actions(), infinite), (infinite, actions()), (infinite, other), (other, infinite)):
        for result in both(expected, got):
            assert result.counts == {"action": 1}
            assert result.errors["action"][4] == np.inf
    for result in both(infinite, infinite):
        assert result.same


def test_a_missing_message_is_found() -> None:
    for result in both(actions(), actions()[:4] + actions()[5:]):
        assert result.counts == {"missing": 1}
        assert result.first[0].message == "sim-0 0 4"
        assert result.compared == 9


def test_an_extra_message_is_found() -> None:
    for got, message in ((actions(11), "sim-0 0 10"), ([*actions(), actions()[3]], "sim-0 0 3 no. 2")):
        for result in both(actions(), got):
            assert result.counts == {"not expected": 1}
            assert result.first[0].message == message


def test_a_reordered_pair_is_found() -> None:
    got = actions()
    got[4], got[5] = got[5], got[4]
    for result in both(actions(), got):
        assert result.counts == {"order": 2}
        first = result.first[0]
        assert (first.expected, first.got) == ("sim-0 0 4", "sim-0 0 5")


@pytest.mark.parametrize(
    ("field", "value"), [("weights_version", 2), ("noise_kind", 2), ("noise_seed", 8), ("stamp", 1)]
)
def test_integers_are_compared_exactly_even_if_array_values_have_a_tolerance(field: str, value: int) -> None:
    for result in both(actions(), changed(actions(), 4, **{field: value})):
        assert result.counts == {field: 1}


def test_phases_origins_bytes_texts_and_maps_are_compared_exactly(make_step: Make) -> None:
    steps: list[Message] = [make_step(number) for number in range(3)]
    phase = np.array([2], np.uint8)
    for field, value in (("phase", phase), ("world", {"0": {"mass": 1.0}}), ("origin", 3)):
        for result in both(steps, changed(steps, 1, **{field: value}), Step.NAME):
            assert result.counts == {field: 1}
    weights: list[Message] = [Weights(1, 0, 0, "aa", b"x" * 100)]
    for field, value in (("payload", b"y" * 100), ("sha256", "ab")):
        for result in both(weights, changed(weights, 0, **{field: value}), Weights.NAME):
            assert result.counts == {field: 1}


def test_a_difference_inside_a_map_is_located() -> None:
    """The report names the key whose value differs. If a key is missing, the report names the map that lacks it."""
    held = {"stopped": [], "held": {"leg": "a stop", "arm": "nan"}}
    for other, field, got in (
        ({"stopped": [], "held": {"leg": "a stop", "arm": "inf"}}, "latches[held][arm]", "'inf'"),
        ({"stopped": ["leg"], "held": held["held"]}, "latches[stopped]", "['leg']"),
        ({"stopped": [], "held": {}}, "latches[held]", "{}"),
    ):
        for result in both([Latches(held)], [Latches(other)], "latches"):
            assert result.counts == {"latches": 1}
            assert (result.first[0].field, result.first[0].got) == (field, got)


def test_nan_in_maps_is_equal_to_nan() -> None:
    def latches(**held: Any) -> list[Message]:
        return [Latches({"held": held, "values": [[float("nan")]]})]

    for result in both(latches(a=float("nan")), latches(a=float("nan")), "latches"):
        assert result.same
    for result in both(latches(a=float("nan"), b=1.0), latches(a=float("nan"), b=2.0), "latches"):
        assert result.first[0].field == "latches[held][b]"
    for result in both(latches(a=float("nan")), latches(a=1.0), "latches"):
        assert result.first[0].field == "latches[held][a]"


def test_a_merged_comparison_lists_the_errors_stream_by_stream() -> None:
    """Three streams have 10 messages each. Only message 4 of the second stream differs, so the only error has index 14.

    All other messages have the error 0.
    """
    equal, different = compare("action", actions(), actions(), exact=True), with_action(actions(), 4, 9.0)
    merged = compare("action", actions(), actions(), exact=True)
    for other in (compare("action", actions(), different, exact=True), equal):
        merged.add(other)
    assert merged.compared == len(merged.errors["action"]) == 30
    assert [place for place, error in enumerate(merged.errors["action"]) if error] == [14]


def test_another_shape_is_found(make_step: Make) -> None:
    for result in both([make_step(0, 2)], [make_step(0, 3)], Step.NAME):
        assert {"observation", "reward", "phase"} <= result.counts.keys()
        assert result.first[0].field == "phase, its shape"


def test_an_empty_list_differs_from_messages() -> None:
    assert compare("action", [], actions(), exact=True).counts == {"not expected": 10}
    assert compare("action", actions(), [], exact=True).counts == {"missing": 10}


def test_plot_shows_where_the_error_is() -> None:
    """The plot shows 600 messages in 60 columns. The only error is at message 300, so column 30 has full height."""
    errors = [0.0] * 600
    errors[300] = 2.0
    lines = plot(errors)
    assert [line[11:].find("█") for line in lines[:5]] == [30] * 5
    assert all(line.count("█") == 1 for line in lines[:5])
    assert lines[0].strip().startswith("2")
    assert all(line.endswith("│█") for line in plot([float("inf")])[:5])
    assert "█" not in "".join(plot([]))
