"""What a peer or a file wrote, on a person's terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.cli.node import _line, _print
from td3_robot.messages import LifecycleChange, Reply
from td3_robot.util.text import meant, near, one_line

STEERS = "y\x1b[2J\npolicy: fault -> active: all well"


@given(st.text())
def test_whatever_it_is_it_is_one_printable_line(text: str) -> None:
    assert one_line(text).isprintable()


def test_what_is_plain_stays_as_it_is_and_what_is_long_is_cut() -> None:
    assert [one_line(value) for value in ("N·m", 3, {"a": 1})] == ["N·m", "3", '{"a": 1}']
    assert one_line("x" * 200) == "x" * 100 + "…"


def test_a_peer_neither_steers_the_terminal_of_an_operator_nor_forges_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print(_line(LifecycleChange(STEERS, STEERS, STEERS, STEERS, 0)))
    _print(Reply(1, STEERS, "", STEERS, {STEERS: STEERS, "sources": {STEERS: {"watch": STEERS}, "x": [STEERS]}}))
    _print(Reply(1, STEERS, STEERS, "fault", {}))
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 + 4
    assert printed.err.count("\n") == 1
    assert "\x1b" not in printed.out + printed.err


def test_what_was_meant_is_asked_for_and_what_is_like_nothing_is_told_what_there_is() -> None:
    # difflib's ratio is twice the letters in common over all letters: "trian" and "train" share 4 of 10, 0.8.
    assert near("trian", ["train", "eval", "brain"], 2) == ["train", "brain"]
    assert meant("trian", ["train", "eval"], "commands:") == "did you mean 'train'?"
    assert meant("zzz", ["train", "eval"], "commands:") == "commands: train, eval"
    assert meant("zzz", [f"a{index}" for index in range(33)], "it has").endswith(", a31, …")
