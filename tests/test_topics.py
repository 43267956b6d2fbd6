"""The table of topics: complete, without contradictions, and what the nodes really do."""

from __future__ import annotations

import pytest

from td3_robot.messages import MESSAGES
from td3_robot.topics import LINKS, QUEUE_LENGTH, TOPICS, Topic
from td3_robot.transport.session import HEARTBEAT_PERIOD, HELLO_PERIOD, PEER_TIMEOUT

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


def test_each_message_is_recorded_from_one_link_only() -> None:
    recorded = [topic.message.NAME for topic in TOPICS if topic.recorded]
    assert len(set(recorded)) == len(recorded)
    assert set(MESSAGES) - set(recorded) == {"heartbeat", "record", "state"}  # none of them says anything about robots


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
