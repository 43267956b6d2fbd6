"""Signals are noted inside a block. A process under nohup ignores SIGHUP."""

from __future__ import annotations

import signal

import pytest

from td3_robot.util import signals


@pytest.mark.usefixtures("hangup")
def test_signals_inside_the_block_are_noted_and_the_handlers_return() -> None:
    before = [signal.getsignal(number) for number in signals.STOPPING]
    with signals.noted() as caught:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
    assert caught == [15, 1, 2, 15]
    assert [signal.getsignal(number) for number in signals.STOPPING] == before


@pytest.mark.usefixtures("hangup")
def test_an_ignored_sighup_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.noted() as caught:
        signal.raise_signal(signal.SIGHUP)
    assert caught == []
    assert signal.SIGHUP not in signals.not_ignored()
    assert signals.not_ignored((signal.SIGQUIT, signal.SIGHUP)) == [signal.SIGQUIT]
