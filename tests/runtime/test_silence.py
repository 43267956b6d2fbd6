"""A node logs one line when a server is silent, and one line when the server answers again."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from td3_robot.runtime.silence import Silence
from td3_robot.transport.link import PEER_TIMEOUT, ClientLink, hello


@pytest.fixture
def client(caplog: pytest.LogCaptureFixture) -> ClientLink:
    caplog.set_level(logging.INFO)
    return ClientLink("learner", hello("policy", "policy", client=1), (), endpoint="tcp://10.0.0.1:5555")


def listen(silence: Silence, client: ClientLink, begin: float, end: float, *, answers: bool) -> None:
    """Let a node listen from ``begin`` to ``end`` (s), with a turn every 0.1 s."""
    for now in np.arange(begin, end, 0.1):
        if answers:
            client.received_at = float(now)
        silence.turn([client], float(now))


@pytest.mark.parametrize("met", [True, False])
def test_a_silent_server_is_logged_once(met: bool, client: ClientLink, caplog: pytest.LogCaptureFixture) -> None:
    """With ``met``, the server first answers. Otherwise it has never answered."""
    silence = Silence()
    listen(silence, client, 100, 110, answers=met)
    listen(silence, client, 110, 140, answers=False)
    listen(silence, client, 140, 160, answers=True)
    warning = (
        "link learner: the server at tcp://10.0.0.1:5555 has sent nothing for 5 s: "
        "it does not run, it hangs, or the connection is broken"
    )
    assert [(it.levelno, it.message) for it in caplog.records] == [
        (logging.WARNING, warning),
        (logging.INFO, "link learner: the server answers again"),
    ]


def test_a_server_is_not_silent_while_the_node_does_not_listen(
    client: ClientLink, caplog: pytest.LogCaptureFixture
) -> None:
    silence = Silence()
    listen(silence, client, 100, 110, answers=True)
    listen(silence, client, 200, 200 + PEER_TIMEOUT - 1, answers=False)  # the node was suspended for 90 s
    assert not caplog.records
