"""Statistics of a stream (one topic of one incarnation of a publisher), also if the publisher's clock jumps."""

from __future__ import annotations

import pytest

from td3_robot.recording.entries import Entry
from td3_robot.recording.stream import Stream
from tests.sessions import BEGIN, SECOND

MS = SECOND // 1000


@pytest.mark.parametrize("jump", [0, 3600 * SECOND, -3600 * SECOND])
def test_rate_and_longest_gap_of_messages_that_arrive_in_batches(jump: int) -> None:
    """100 messages at 50 Hz have a pause of 1 s in the middle. A batch arrives every 100 ms; the first is 150 ms late.

    The pause makes one interval 1.02 s long. The 99 intervals of 20 ms and the pause take 2.98 s.

    In two cases, the publisher's clock jumps by an hour at message 60. Then only the receive times show the length of
    the interval before message 60. Their error is up to 0.5 s, the maximum delay of a message.
    """
    stream = None
    for number in range(100):
        at = 20 * number + 1000 * (number >= 50)
        received = BEGIN + (at // 100 * 100 + 100 + 150 * (number < 5)) * MS
        entry = Entry("leg", 1, "step", "policy", number, BEGIN + at * MS + jump * (number >= 60), received, b"x")
        stream = stream or Stream(entry)
        stream.add(entry)
    assert stream
    report = stream.report()
    assert report["longest_s"] == 1.02
    seconds = 99 / report["rate_hz"]
    assert seconds == pytest.approx(2.98, abs=0.52 if jump else 0.001)
