"""The table of topics: complete, without contradictions, and what the nodes really do."""

from __future__ import annotations

import pytest

from td3_robot.core_types import Peer
from td3_robot.messages import MESSAGES, Record
from td3_robot.topics import LINKS, LISTENERS, QUEUE_LENGTH, TOPICS, Topic
from td3_robot.transport import codec
from td3_robot.transport import link as handshake
from td3_robot.transport.link import HEARTBEAT_PERIOD, HELLO_PERIOD, PEER_TIMEOUT, ClientLink
from td3_robot.transport.tap import Tap
from tests.golden.regenerate import samples

HANDSHAKE = {"hello", "welcome", "refused", "heartbeat", "bye"}


def test_every_message_has_a_topic() -> None:
    assert {topic.message for topic in TOPICS} == set(MESSAGES.values())


def test_no_row_is_there_twice() -> None:
    keys = [(topic.message, topic.publisher, topic.subscriber, topic.link) for topic in TOPICS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: f"{topic.message.NAME}-{topic.link}-{topic.queue}")
def test_row(topic: Topic) -> None:
    assert topic.link in (*LINKS, "any")
    assert topic.rate
    assert (topic.queue == "handshake") == (topic.message.NAME in HANDSHAKE) == (topic.link == "any")


class Records:
    """What a tap hands to a recorder that is there."""

    def __init__(self) -> None:
        self.topics: list[str] = []
        hello = handshake.hello("node", "n", client=1)
        client = ClientLink("recorder", hello, (), state="welcome")
        client.sent(0.0)
        self.tap = Tap(client, self._take)

    def _take(self, name: str, payload: bytes) -> bool:
        assert name == Record.NAME
        self.topics += [record.topic for record in codec.decode_records(payload) if isinstance(record, Record)]
        return True

    def said(self) -> list[str]:
        """The topics of what it was offered."""
        self.tap.flush(0.0)
        return self.topics


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: f"{topic.message.NAME}-{topic.publisher}-{topic.link}")
def test_what_the_table_says_is_recorded_is_offered_and_nothing_else(topic: Topic) -> None:
    """To the publisher's tap, as sent; or, of publishers that have no tap, to that of the core that takes it."""
    sample = next(message for message in samples() if type(message) is topic.message)
    publisher, subscriber = Records(), Records()
    if topic.publisher != "operator":
        publisher.tap.offer(topic.link, sample, codec.encode(sample))
    assert publisher.said() == ([sample.NAME] if topic.recorded == "sent" else [])
    if topic.link in LISTENERS:  # whose cores are not recorded themselves
        return
    role = topic.publisher if topic.publisher in ("operator", "driver", "simulator", "evaluator") else "policy"
    peer = Peer(topic.link, b"k", handshake.hello(role, "p", client=2), {})
    subscriber.tap.took(0.0, [(peer, sample)])
    assert subscriber.said() == ["turn", *([sample.NAME] if topic.recorded == "taken" else [])]


def test_what_is_not_recorded_says_nothing_about_robots() -> None:
    assert {topic.message.NAME for topic in TOPICS if topic.recorded == "no"} == {"heartbeat", "record"}


def test_the_servers_name_is_an_end_of_its_link() -> None:
    for topic in TOPICS:
        if topic.link != "any":
            ends = f"{topic.publisher} {topic.subscriber}"
            assert topic.link in ends


def test_times_fit_each_other() -> None:
    """Several Heartbeats may get lost before a client is taken for gone, and a queue outlasts that at 60 Hz."""
    assert HELLO_PERIOD < HEARTBEAT_PERIOD
    assert PEER_TIMEOUT >= 3 * HEARTBEAT_PERIOD
    assert QUEUE_LENGTH / 60 > PEER_TIMEOUT
