"""Tests how a terminal shows text from peers and files. Also tests suggestions for mistyped words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from td3_robot.cli.node import _line, _print
from td3_robot.messages import LifecycleChange, Reply
from td3_robot.util.text import did_you_mean, one_line, similar

STEERS = "y\x1b[2J\npolicy: fault -> active: all well"


@given(st.text())
def test_any_text_becomes_one_printable_line(text: str) -> None:
    assert one_line(text).isprintable()


def test_plain_text_stays_and_long_text_is_shortened() -> None:
    assert [one_line(value) for value in ("N·m", 3, {"a": 1})] == ["N·m", "3", '{"a": 1}']
    assert one_line("x" * 200) == "x" * 100 + "…"


def test_a_peer_can_neither_control_the_terminal_nor_add_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print(_line(LifecycleChange(STEERS, STEERS, STEERS, STEERS, 0)))
    _print(Reply(1, STEERS, "", STEERS, {STEERS: STEERS, "sources": {STEERS: {"watch": STEERS}, "x": [STEERS]}}))
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 + 4  # one line of _line, and four lines of _print
    assert "\x1b" not in printed.out


def test_a_mistyped_word_gets_a_suggestion_or_the_list_of_known_words() -> None:
    # difflib's ratio is 2 · (letters that match in order) / (letters of both words).
    # In "trian" and "train", 4 letters match in order, so the ratio is 2 · 4 / 10 = 0.8.
    assert similar("trian", ["train", "eval", "brain"], 2) == ["train", "brain"]
    assert did_you_mean("trian", ["train", "eval"], "commands:") == "did you mean 'train'?"
    assert did_you_mean("zzz", ["train", "eval"], "commands:") == "commands: train, eval"
    assert did_you_mean("zzz", [f"a{index}" for index in range(33)], "it has").endswith(", a31, …")
