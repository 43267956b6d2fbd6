"""Playing follows the recorded times. To a live node, the player looks like a real peer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from td3_robot.cli.main import main
from td3_robot.core_types import ROBOT_ROLES, Peer
from td3_robot.messages import Action, Bye, Hello, Step, Weights
from td3_robot.policy.core import PolicyCore
from td3_robot.recording import play
from td3_robot.recording.play import Pause, scheduled
from td3_robot.recording.player import Player, playable
from td3_robot.recording.reader import Session
from td3_robot.specs import RobotSpec
from td3_robot.topics import TOPICS
from td3_robot.transport import link as handshake
from td3_robot.transport.bus import Bus
from td3_robot.transport.link import ClientLink, ServerLink
from tests.conftest import poll_until
from tests.sessions import BEGIN, SECOND, entries_of

Make = Callable[..., Any]


@pytest.fixture
def recorded(acted: Make, save: Make, spec: RobotSpec) -> Path:
    """A recording of two robots of sim-0: a Hello, 30 Steps, 30 Actions and two Weights, 1/60 s apart."""
    hello = handshake.hello("simulator", "sim-0", client=5, robots=2, spec=spec)
    path: Path = save("a.mcap", entries_of([("sim-0", hello), *acted(30)]))
    return path


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/policy"


@pytest.fixture
def server(endpoint: str, nobody_expires: None) -> Iterator[Bus]:
    """A policy server that accepts Steps at ``endpoint``."""
    del nobody_expires
    bus = Bus()
    bus.serve(endpoint, ServerLink("policy", "policy", dict.fromkeys(ROBOT_ROLES, (Step,)), {}, 1))
    yield bus
    bus.close()


def test_the_schedule_follows_start_duration_and_rate(acted: Make) -> None:
    """Entries are 0.1 s apart. Start 0.25 s and duration 0.5 s select the entries from 0.3 s to 0.7 s.

    Rate 2 plays the first of them after (0.3 s - 0.25 s) / 2.
    """
    entries = entries_of(acted(10), SECOND // 10)
    begin = entries[0].received
    every = [round(t, 6) for t, _ in scheduled(iter(entries), begin)]
    assert every == [round(0.1 * n, 6) for n in range(len(entries))]
    part = list(scheduled(iter(entries), begin, rate=2, start=0.25, duration=0.5))
    assert [round(t, 6) for t, _ in part] == [0.025, 0.075, 0.125, 0.175, 0.225]
    assert [entry for _, entry in part] == entries[3:8]
    # Entries with a time before the beginning play at once.
    assert [t for t, _ in scheduled(iter(entries[:2]), begin + SECOND)] == [0.0, 0.0]


def test_start_counts_from_the_beginning_of_the_recording(
    acted: Make, save: Make, spec: RobotSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Entries are 0.1 s apart: a Hello at 0 s, Weights at 0.1 s, ten other messages, and Weights at 1.2 s."""
    hello = handshake.hello("simulator", "sim-0", client=5, robots=2, spec=spec)
    path = save("b.mcap", entries_of([("sim-0", hello), *acted(10)], SECOND // 10))
    played: list[tuple[float, int]] = []

    def run(player: Any, schedule: Iterator[tuple[float, Any]], *_: Any) -> None:
        del player
        played.extend((round(offset, 6), entry.sequence) for offset, entry in schedule)

    monkeypatch.setattr(play, "_run", run)
    monkeypatch.setattr(play, "_meet", lambda *_: [])
    for start in ("0", "1", "0.1"):
        words = ["--learner", f"ipc://{tmp_path}/learner", "--topics", "weights", "--start", start]
        assert main(["play", str(path), *words]) == 0
    assert played == [(0.1, 0), (1.2, 1), (0.2, 1), (0.0, 0), (1.1, 1)]


def test_batched_messages_are_played_at_their_publication_times(acted: Make, save: Make) -> None:
    """Steps and Actions alternate, 10 ms apart, and arrive in batches every 100 ms.

    A message plays at its publication time plus the shortest delay of its node. For sim-0 this delay is 20 ms: the last
    Step of a batch is published at 80 ms and received at 100 ms. For the policy server it is 15 ms: the last Action is
    published at 90 ms and received at 105 ms. The clock of the policy server is one hour ahead, which changes nothing.
    """
    ms, messages = SECOND // 1000, [item for item in acted(20) if isinstance(item[1], Step | Action)]
    entries, expected = [], []
    for n, entry in enumerate(entries_of(messages)):
        late, ahead = (0, 0) if entry.topic == "step" else (5, 3600 * SECOND)
        time, arrives = BEGIN + 10 * n * ms, BEGIN + (100 * (n // 10 + 1) + late) * ms
        entries.append(replace(entry, published=time + ahead, received=arrives))
        expected.append((time + (15 if late else 20) * ms, entry.topic, entry.sequence))
    entries.sort(key=lambda entry: entry.received)
    assert [entry.topic for entry in entries[:6]] == ["step"] * 5 + ["action"]
    played = Session([save("batches.mcap", entries)]).timed(["step", "action"])
    assert [(entry.received, entry.topic, entry.sequence) for entry in played] == expected


def test_a_monitor_receives_a_robots_hello_once(acted: Make, save: Make, spec: RobotSpec, monkeypatch: Any) -> None:
    """The player sends the Hello before it plays the recording, so it must skip the Hello in the recording.

    The recorder received this Hello 0.2 s late, so ``Session.timed`` corrects the received time. The player must skip
    the Hello with the corrected time, too.
    """
    hello = handshake.hello("simulator", "sim-0", client=5, robots=2, spec=spec)
    first, *others = entries_of([("sim-0", hello), *acted(5)])
    session = Session([save("late.mcap", [replace(first, published=first.published - SECOND // 5), *others])])
    sent: list[tuple[str, int]] = []

    def send(*arguments: Any) -> bool:
        record = arguments[-1]
        sent.append((record.topic, record.sequence))
        return True

    monkeypatch.setattr(Bus, "send", send)
    player = Player(session, (), {"monitor": "ipc:///nobody"}, {})
    player.introduce()
    for entry in session.timed():
        player.play(entry)
    player.close()
    assert len(sent) == 1 + len(others)
    assert sent.count(("hello", 0)) == 1


def test_a_clock_change_does_not_reorder_the_messages_of_one_node(acted: Make, save: Make) -> None:
    """After ten Steps the clock of the node goes back by one hour.

    The player plays a Step at its received time or earlier, but at most ON_THE_WAY_NS (0.5 s) earlier.
    """
    steps = entries_of([item for item in acted(20) if isinstance(item[1], Step)])
    jumped = [replace(step, published=step.published - 3600 * SECOND * (n >= 10)) for n, step in enumerate(steps)]
    played = list(Session([save("jump.mcap", jumped)]).timed())
    assert [entry.sequence for entry in played] == list(range(20))
    assert all(0 <= was.received - now.received <= SECOND // 2 for was, now in zip(jumped, played, strict=True))


@pytest.mark.parametrize("jump", [3600, -3600])
def test_the_times_of_messages_stay_exact_when_somebody_sets_the_clock_of_their_node(
    jump: int, make_step: Callable[..., Step], save: Make, spec: RobotSpec
) -> None:
    """40 Steps are 20 ms apart, and arrive in batches every 100 ms. Before Step 22, the clock jumps by an hour.

    The last Step of a batch is published at 80 ms and received at 100 ms. So each Step plays 20 ms after its
    publication. A recorder can repeat an old Hello, which has another delay, so this Hello changes nothing.
    """
    ms = SECOND // 1000
    hello = handshake.hello("simulator", "sim-0", client=5, robots=2, spec=spec)
    (repeated,) = entries_of([("sim-0", hello)])
    entries = [replace(repeated, published=BEGIN - 3 * 3600 * SECOND)]
    for n, entry in enumerate(entries_of([("sim-0", make_step(number, 2)) for number in range(40)])):
        time, arrives = BEGIN + 20 * n * ms, BEGIN + 100 * (n // 5 + 1) * ms
        entries.append(replace(entry, published=time + jump * SECOND * (n >= 22), received=arrives))
    session = Session([save("jump.mcap", entries)])
    for topics in (["step"], []):
        times = [entry.received for entry in session.timed(topics) if entry.topic == "step"]
        assert times == [BEGIN + 20 * (n + 1) * ms for n in range(40)]


def test_pause_stops_the_clock() -> None:
    pause = Pause(True)
    stopped = pause.now()
    assert pause.now() == stopped
    pause.toggle()
    going = pause.now()
    assert going >= stopped
    pause.toggle()
    assert pause.now() == pause.now()


def test_each_topic_is_played_on_its_links() -> None:
    assert playable() == {
        "step": [("policy", False), ("learner", False)],
        "action": [("policy", True)],
        "throttle": [("learner", True)],
        "weights": [("learner", True)],
    }
    assert playable().keys() < {topic.message.NAME for topic in TOPICS}


def drive(player: Player, other: Bus, until: Callable[[list[Any]], bool]) -> list[Any]:
    """Receive on both ends, until ``other`` has received messages for which ``until`` returns True. Fail after 20 s."""
    got: list[Any] = []
    deadline = time.monotonic() + 20
    while not until(got):
        assert time.monotonic() < deadline, got
        player.turn(0.005)
        got += other.receive(0.005)
    return got


def test_a_live_policy_server_answers_as_recorded(recorded: Path, server: Bus, endpoint: str) -> None:
    """With the same weights and noise, the server sends the recorded actions, bit for bit."""
    session = Session([recorded])
    player = Player(session, ["step"], {"policy": endpoint}, {})
    assert player.missing() == ["policy"]
    drive(player, server, lambda _: not player.missing())
    core = PolicyCore(session.config().seed)
    answers: list[Action] = []
    for entry, message in session.messages(("step", "weights")):
        if isinstance(message, Weights):
            core.step([("learner", message)], 0.0)
            continue
        player.play(entry)
        inputs = drive(player, server, lambda got: any(isinstance(m, Step) for _, m in got))
        answers += [m for _, m in core.step(inputs, 0.0) if isinstance(m, Action)]
    expected = [m for _, m in session.messages(("action",)) if isinstance(m, Action)]
    assert len(answers) == 30
    for one, other in zip(answers, expected, strict=True):
        assert one.action.tobytes() == other.action.tobytes()
        assert one.answers == other.answers
    assert player.counts() == {"step": 30}
    player.close()


def test_each_loop_of_play_has_a_higher_incarnation_and_the_remapped_name(
    recorded: Path, server: Bus, endpoint: str
) -> None:
    """``loop=2``: two loops are complete. Each loop adds 1,000 to the recorded incarnation, which is 0.

    sim-0 has the new name ghost.
    """
    session = Session([recorded])
    player = Player(session, ["step"], {"policy": endpoint}, {"sim-0": "ghost"}, loop=2)
    (met,) = [m for _, m in drive(player, server, lambda got: any(isinstance(m, Hello) for _, m in got))]
    assert (met.name, met.incarnation, met.robots) == ("ghost", 2000, 2)
    drive(player, server, lambda _: not player.missing())
    player.play(next(session.entries(("step",))))
    got = drive(player, server, lambda got: any(isinstance(m, Step) for _, m in got))
    (step,) = [m for _, m in got if isinstance(m, Step)]
    assert (step.source, step.incarnation) == ("ghost", 2000)
    player.close()
    poll_until(lambda: any(isinstance(m, Bye) for _, m in server.receive(0.05)), lambda: "no Bye", timeout=20)


def test_steps_of_an_earlier_process_are_played_under_its_incarnation(
    acted: Make, save: Make, spec: RobotSpec, server: Bus, endpoint: str
) -> None:
    """The recording has two processes of sim-0. A server accepts only Steps with the incarnation of the Hello."""
    hellos = [handshake.hello("simulator", "sim-0", client=n, incarnation=n, robots=2, spec=spec) for n in (1, 2)]
    steps = [message for _, message in acted(5) if isinstance(message, Step)]
    lives = [
        item for hello in hellos for item in [hello, *(changed(step, incarnation=hello.incarnation) for step in steps)]
    ]
    session = Session([save("two.mcap", entries_of([("sim-0", message) for message in lives]))])
    player = Player(session, ["step"], {"policy": endpoint}, {})
    drive(player, server, lambda _: not player.missing())
    for entry in session.entries(("step",)):
        player.play(entry)
    got = drive(player, server, lambda got: sum(isinstance(m, Step) for _, m in got) == 2 * len(steps))
    played = [(m.incarnation, m.sequence) for _, m in got if isinstance(m, Step)]
    assert played == [(hello.incarnation, step.sequence) for hello in hellos for step in steps]
    assert not server.dropped()
    player.close()


def test_weights_are_played_to_a_live_policy_server(recorded: Path, tmp_path: Path) -> None:
    """The player takes the place of the learner."""
    session = Session([recorded])
    endpoint = f"ipc://{tmp_path}/learner"
    player = Player(session, ["weights"], {"learner": endpoint}, {})
    client = Bus()
    client.connect(endpoint, ClientLink("learner", handshake.hello("policy", "policy", client=1), (Weights,)))
    drive(player, client, lambda _: not player.missing())
    for entry in session.entries(("weights",)):
        player.play(entry)
    got = drive(player, client, lambda got: sum(isinstance(m, Weights) for _, m in got) == 2)
    assert [m.version for _, m in got if isinstance(m, Weights)] == [1, 2]
    client.close()
    player.close()


def test_weights_whose_policy_is_not_recorded_are_not_played(acted: Make, save: Make, tmp_path: Path) -> None:
    """The recorder left the policy out, so ``payload`` is empty. The player does not count the message."""
    weights = changed(acted(1)[0][1], payload=b"")
    session = Session([save("a.mcap", entries_of([("learner", weights)]))])
    player = Player(session, ["weights"], {"learner": f"ipc://{tmp_path}/learner"}, {})
    for entry in session.entries():
        player.play(entry)
    assert player.counts() == {}
    player.close()


@pytest.mark.usefixtures("recorded")
def test_the_play_command_plays_the_steps_in_order(server: Bus, endpoint: str, command: Callable[..., Any]) -> None:
    """Play at ten times the speed, without the first 0.5 s."""
    player = command("play", "a.mcap", "--policy", endpoint, "--rate", "10", "--start", "0.5", "--json")
    got: list[Any] = []
    deadline = time.monotonic() + 120
    while not any(isinstance(m, Bye) for _, m in got):
        assert time.monotonic() < deadline, player.output()
        got += server.receive(0.05)
    assert player.finish() == 0, player.output()
    # Message 0 is the Hello, 1 and 32 are Weights, 30 is Step 14, and 33 is Step 15. Messages are 16,666,666 ns apart,
    # so message 30 comes 20 ns before 0.5 s.
    sequences = [m.sequence for _, m in got if isinstance(m, Step)]
    assert sequences == list(range(15, 30))
    assert all(isinstance(origin, Peer) for origin, _ in got)
    report = json.loads(player.lines[-1])
    assert (report["loops"], report["step"]) == (1, len(sequences))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no live node is given"),
        (("--policy", "ipc:///tmp/x", "--rate", "0"), "--rate is 0; allowed: above 0"),
        (("--policy", "ipc:///tmp/x", "--rate", "inf"), "--rate is inf; allowed: above 0"),
        (("--policy", "ipc:///tmp/x", "--start", "nan"), "--start is nan; allowed: 0 s or more"),
        (("--policy", "ipc:///tmp/x", "--start", "-1"), "--start is -1; allowed: 0 s or more"),
        (("--policy", "ipc:///tmp/x", "--duration", "nan"), "--duration is nan; allowed: above 0 s"),
        (("--policy", "ipc:///tmp/x", "--topics", "status"), "'status' cannot be played; allowed: step"),
        (("--policy", "ipc:///tmp/x", "--remap", "a"), "it must be OLD=NEW"),
        (
            ("--policy", "ipc:///tmp/x", "--remap", "leg=b"),
            "the recording has no publisher 'leg'; its publishers: learner, policy, sim-0",
        ),
        (("--policy", "ipc:///tmp/x", "--remap", "sim-0=my leg"), "NEW is 'my leg'; allowed: 1 to 64 letters"),
        (("--monitor", "ipc:///tmp/x", "--remap", "sim-0=policy"), "policy and sim-0 would both be 'policy'"),
        (
            ("--policy", "ipc:///tmp/x", "--remap", "sim-0=a", "--remap", "sim-0=b"),
            "'sim-0' has the new name 'a' already",
        ),
        (("--policy", "ipc:///tmp/x", "--start", "9", "--loop"), "holds no step from 9 s on; it is 1.033 s long"),
        (("--policy", "ipc:///tmp/x", "--start", "1.04", "--duration", "2"), "from 1.04 s to 3.04 s; it is 1.033 s"),
        (("--monitor", "ipc:///tmp/x", "--start", "9"), "holds no message from 9 s on; it is 1.033 s long"),
        (("--learner", "ipc:///tmp/x", "--topics", "throttle"), "no 'throttle'; it holds action, hello, step, weights"),
        (("--policy", "tcp://203.0.113.1:5555"), "beyond loopback"),
    ],
)
def test_wrong_options_give_a_one_line_error(
    recorded: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["play", str(recorded), *arguments]) == 2
    output = capsys.readouterr()
    assert words in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)


def test_play_says_for_which_node_it_waits(
    recorded: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(play, "_SAY", 0.0)
    monkeypatch.setattr(play, "_WAIT", 0.25)
    assert main(["play", str(recorded), "--policy", endpoint]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"td3-robot play: waits at most 0.25 s for a node on link policy ({endpoint})",
        "td3-robot play: no node answers on link policy within 0.25 s",
    ]


def test_a_server_that_disappears_is_an_error(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The player must report the lost server even if the player's queue accepts all messages."""
    monkeypatch.setattr(play, "PEER_TIMEOUT", 2.0)
    monkeypatch.setattr(play, "_SAY", 1e9)  # on a busy machine, the server may need more than a second for its Welcome
    # A busy machine can pause the player for a second. With the usual HEARTBEAT_PERIOD of 1 s, the player would take
    # this pause for a suspension, and would not report the lost server.
    monkeypatch.setattr("td3_robot.recording.player.HEARTBEAT_PERIOD", 1e9)
    endpoint = f"ipc://{tmp_path}/policy"
    server = Bus()
    server.serve(endpoint, ServerLink("policy", "policy", {"simulator": (Step,)}, {}, 1))

    def serve() -> None:
        while not any(isinstance(message, Step) for _, message in server.receive(0.05)):
            pass
        server.close()

    thread = threading.Thread(target=serve, daemon=True)  # must not keep pytest alive if the player fails
    thread.start()
    assert main(["play", str(recorded), "--policy", endpoint]) == 1
    thread.join(20)
    error = capsys.readouterr().err
    assert error.startswith("td3-robot play: the server of link policy has been silent for 2 s, and did not receive")
    assert error.count("\n") == 1


def test_two_publishers_may_swap_names(recorded: Path) -> None:
    """Only the publishers of the played topics must have different names."""
    remap = ["policy=sim-0", "sim-0=policy"]
    session = Session([recorded])
    assert play._renamed(remap, session, ["step", "action"]) == {"policy": "sim-0", "sim-0": "policy"}
    # Only Steps are played, so the name "policy" is free.
    assert play._renamed(["sim-0=policy"], session, ["step"]) == {"sim-0": "policy"}
