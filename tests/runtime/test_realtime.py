"""Real-time options of the operating system. Most tests apply them in a child process, which reports the outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from td3_robot.config import loading as configuration
from td3_robot.config.realtime import RealtimeConfig
from td3_robot.errors import ConfigError
from td3_robot.runtime.realtime import apply

_ASK = """
import ctypes, gc, json, os, resource, sys  # before setuid, because the new user cannot always read Python's files
from td3_robot.config.realtime import RealtimeConfig
from td3_robot.runtime.realtime import apply
if sys.argv[2] == "unprivileged":
    resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    if os.getuid() == 0:
        os.setuid(65534)
outcome = apply(RealtimeConfig(**json.loads(sys.argv[1])))
locked = next(line for line in open("/proc/self/status") if line.startswith("VmLck"))
print(json.dumps({"applied": outcome.applied, "refused": outcome.refused, "gc": gc.isenabled(),
    "frozen": gc.get_freeze_count(), "policy": os.sched_getscheduler(0), "processors": sorted(os.sched_getaffinity(0)),
    "locked": int(locked.split()[1])}))
"""


def ask(*, privileged: bool = True, **options: Any) -> dict[str, Any]:
    """Apply options in a child process and return its report."""
    word = "privileged" if privileged else "unprivileged"
    command = [sys.executable, "-c", _ASK, json.dumps(options), word]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_default_applies_nothing() -> None:
    result = ask()
    assert (result["applied"], result["refused"], result["gc"]) == ([], [], True)


def test_options_that_need_no_permission_are_applied() -> None:
    processor = min(os.sched_getaffinity(0))
    result = ask(processors=[processor], freeze_gc=True)
    assert result["applied"] == [f"on processors {processor}", "garbage collector frozen"]
    assert (result["gc"], result["processors"]) == (False, [processor])
    assert result["frozen"] > 0


def test_privileged_options_are_applied_or_reported_as_refused() -> None:
    result = ask(priority=10, lock_memory=True)
    assert len(result["applied"] + result["refused"]) == 2
    assert ("SCHED_FIFO 10" in result["applied"]) == (result["policy"] == os.SCHED_FIFO)
    assert ("memory locked" in result["applied"]) == (result["locked"] > 0)


def test_refused_options_are_reported_and_all_others_are_applied() -> None:
    result = ask(privileged=False, priority=10, lock_memory=True, freeze_gc=True)
    assert result["refused"][-1] == "SCHED_FIFO 10: Operation not permitted"
    assert result["refused"][0].startswith("memory locked: ")
    assert result["applied"] == ["garbage collector frozen"]


def test_processors_that_the_machine_lacks_are_refused() -> None:
    outcome = apply(RealtimeConfig(processors=(4000,)))
    assert outcome.applied == []
    assert outcome.refused[0].startswith("on processors 4000: ")


def test_configuration_is_read_and_checked() -> None:
    config = configuration.parse({"realtime": {"processors": [1], "priority": 20, "lock_memory": True}})
    assert config.realtime == RealtimeConfig(processors=(1,), priority=20, lock_memory=True)
    assert configuration.parse({"realtime": {"spin_us": 1500}}).realtime.spin_s == 0.0015
    with pytest.raises(ConfigError, match=r"realtime\.priority is 100"):
        configuration.parse({"realtime": {"priority": 100}})
    with pytest.raises(ConfigError, match=r"realtime\.spin_us is 20001"):
        configuration.parse({"realtime": {"spin_us": 20_001}})
    with pytest.raises(ConfigError, match=r"spin_us is 5 and realtime\.priority is 1: .* set spin_us or priority to 0"):
        configuration.parse({"realtime": {"spin_us": 5, "priority": 1}})


_BESIDE = """
import json, os, threading
from td3_robot.config.realtime import RealtimeConfig
from td3_robot.runtime.realtime import apply, stand_back
applied = apply(RealtimeConfig(priority=PRIORITY)).applied
def beside():
    stand_back()
    print(json.dumps([bool(applied), os.sched_getparam(0).sched_priority, os.sched_getscheduler(0)]))
thread = threading.Thread(target=beside)
thread.start()
thread.join()
print(json.dumps([os.sched_getparam(0).sched_priority, os.sched_getscheduler(0)]))
"""


@pytest.mark.parametrize(("priority", "beside"), [(10, 9), (1, 1), (0, 0)])
def test_if_the_loop_has_a_priority_above_1_a_helper_thread_gets_this_priority_minus_1(
    priority: int, beside: int
) -> None:
    program = _BESIDE.replace("PRIORITY", str(priority))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    [granted, its, kind], [own, own_kind] = map(json.loads, done.stdout.splitlines())
    if priority and not granted:
        pytest.skip("SCHED_FIFO is not permitted here")
    assert (its, own) == (beside, priority)
    assert kind == own_kind == (os.SCHED_FIFO if priority else os.SCHED_OTHER)
