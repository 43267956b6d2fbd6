"""The table of topics is complete and consistent, and matches what nodes record."""

from __future__ import annotations

import pytest

from td3_robot.core_types import Peer
from td3_robot.messages import MESSAGES, Record
from td3_robot.topics import LINKS, LISTENERS, QUEUE_LENGTH, TOPICS, Topic
from td3_robot.transport import codec
from td3_robot.transport import link as handshake
from td3_robot.transport.link import HEARTBEAT_PERIOD, HELLO_PERIOD, PEER_TIMEOUT, ClientLink
from td3_robot.transport.tap import Copies
from tests.golden.regenerate import samples

HANDSHAKE = {"hello", "welcome", "refused", "heartbeat", "bye"}


def test_every_message_has_a_topic() -> None:
    assert {topic.message for topic in TOPICS} == set(MESSAGES.values())


def test_rows_are_unique() -> None:
    keys = [(topic.message, topic.publisher, topic.subscriber, topic.link) for topic in TOPICS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: f"{topic.message.NAME}-{topic.link}-{topic.queue}")
def test_row_is_consistent(topic: Topic) -> None:
    assert topic.link in (*LINKS, "any")
    assert topic.rate
    assert (topic.queue == "handshake") == (topic.message.NAME in HANDSHAKE) == (topic.link == "any")


class Records:
    """Collects what a tap sends to a connected recorder. A tap copies a node's messages to a recorder or monitor."""

    def __init__(self) -> None:
        self.topics: list[str] = []
        hello = handshake.hello("node", "n", client=1)
        client = ClientLink("recorder", hello, (), state="welcome")
        client.sent_at = 0.0
        self.copies = Copies()
        self.tap = self.copies.tap(client, self._take)

    def _take(self, name: str, payload: bytes) -> bool:
        assert name == Record.NAME
        self.topics += [record.topic for record in codec.decode_records(payload) if isinstance(record, Record)]
        return True

    def recorded_topics(self) -> list[str]:
        """Return the topics of the messages sent so far."""
        self.tap.flush(0.0)
        return self.topics


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: f"{topic.message.NAME}-{topic.publisher}-{topic.link}")
def test_taps_record_exactly_the_topics_of_the_table(topic: Topic) -> None:
    """The publisher's tap records a sent message. If the publisher has no tap, the subscriber's tap records it."""
    sample = next(message for message in samples() if type(message) is topic.message)
    publisher, subscriber = Records(), Records()
    if topic.publisher != "operator":
        publisher.copies.offer(topic.link, sample, codec.encode(sample))
    assert publisher.recorded_topics() == ([sample.NAME] if topic.recorded == "sent" else [])
    if topic.link in LISTENERS:  # recorders and monitors do not record their own inputs
        return
    role = topic.publisher if topic.publisher in ("operator", "driver", "simulator", "evaluator") else "policy"
    peer = Peer(topic.link, b"k", handshake.hello(role, "p", client=2), {})
    subscriber.copies.record_turn(0.0, [(peer, sample)])
    assert subscriber.recorded_topics() == ["turn", *([sample.NAME] if topic.recorded == "taken" else [])]


def test_every_message_except_heartbeat_and_record_is_recorded() -> None:
    assert {topic.message.NAME for topic in TOPICS if topic.recorded == "no"} == {"heartbeat", "record"}


def test_link_is_named_after_one_of_its_ends() -> None:
    for topic in TOPICS:
        if topic.link != "any":
            ends = f"{topic.publisher} {topic.subscriber}"
            assert topic.link in ends


def test_periods_timeouts_and_queue_length_are_consistent() -> None:
    """A client times out after several lost Heartbeats.

    At 60 messages per second, a queue holds all messages of PEER_TIMEOUT seconds.
    """
    assert HELLO_PERIOD < HEARTBEAT_PERIOD
    assert PEER_TIMEOUT >= 3 * HEARTBEAT_PERIOD
    assert QUEUE_LENGTH / 60 > PEER_TIMEOUT
