"""The errors that td3-robot raises on purpose, as one tree. A few modules add subclasses.

Td3RobotError                 an expected failure; exit code 2 unless noted
├── ConfigError               a configuration key, value or file is wrong
├── UsageError                a command line is wrong
│   └── ArgumentError         an argument of a Python function is wrong
├── BundleError               a policy, weights message or checkpoint is missing, damaged, hostile or unsuitable
├── DivergenceError           training has diverged; more updates would destroy the policy
├── ProtocolError             bytes from a peer are not a message of this protocol
├── HandshakeError            one side of a link refuses the other, for example because their configurations differ
├── EndpointError             an address cannot be used or is not allowed
│   └── EndpointBusyError     another process serves an ``ipc://`` address
├── KeysError                 a key, key folder or allow-list is missing, damaged or open to other users
├── CommandError              a policy server or robot does not carry out an operator's command (exit code: 1)
├── LifecycleError            the state of a node does not allow a command (exit code: 1)
├── SessionError              a file is not a recording, or it is damaged or has another protocol version
├── RunFolderError            a run folder is taken, missing or not a run
└── NodeError                 a process, host or storage of a training has failed (exit code: that of the process, or 1)
"""

from __future__ import annotations

from typing import Any

EXIT_GOOD = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2

USER_CODE = (Exception, SystemExit)
"""What the code of a user may raise. ``sys.exit`` raises SystemExit, which is no Exception."""


def exit_code_of(signal: int) -> int:
    """Return the exit code of a command that a signal ended: 130 for SIGINT (Ctrl-C), 143 for SIGTERM."""
    return 128 + signal


class Td3RobotError(Exception):
    """An expected failure. Its text is one line that names the thing, the value and what is allowed."""

    exit_code = EXIT_USAGE


class ConfigError(Td3RobotError):
    """A configuration names an unknown key, holds a value that is not allowed, or contradicts itself."""


class UsageError(Td3RobotError):
    """A command line is wrong."""


class ArgumentError(UsageError, ValueError):
    """An argument of a Python function has a value that is not allowed.

    If the value comes from an option of a command, the option has the same name. So the command prints ``--`` before
    the name. ``problem`` says what the value is, and what is allowed.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")


class BundleError(Td3RobotError):
    """A policy bundle, weights message or checkpoint is missing, damaged, hostile or unsuitable.

    An unsuitable policy is, for example, a policy for another robot.
    """


class DivergenceError(Td3RobotError):
    """Training has diverged. The text says what is wrong, and which files remain."""


class ProtocolError(Td3RobotError):
    """Bytes from a peer are not a valid message. ``kind`` names the counter that counts this error."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class HandshakeError(Td3RobotError):
    """One side of a link refuses the other side; the text says why."""


class EndpointError(Td3RobotError):
    """An endpoint cannot be served or reached, is malformed, or is not allowed without keys."""


class EndpointBusyError(EndpointError):
    """Another process serves an ``ipc://`` endpoint."""


class KeysError(Td3RobotError):
    """A key, key folder or allow-list is missing, malformed, damaged, or open to other users."""


class CommandError(Td3RobotError):
    """A policy server or a robot refuses a command, does not answer, or does not follow the command.

    ``reply`` is the server's :class:`td3_robot.messages.Reply`; None if there was no answer.
    """

    exit_code = EXIT_CHECK_FAILED

    def __init__(self, text: str, reply: Any = None) -> None:
        super().__init__(text)
        self.reply = reply


class LifecycleError(Td3RobotError):
    """A node refuses a command that its state or its policies do not allow."""

    exit_code = EXIT_CHECK_FAILED


class SessionError(Td3RobotError):
    """A file is not a recording, or it is damaged or has another protocol version."""


class RunFolderError(Td3RobotError):
    """A run folder already holds a run, is in use, or does not hold the run that a command needs."""


class NodeError(Td3RobotError):
    """A process, a host or the storage of a training has failed."""

    def __init__(self, text: str, exit_code: int = EXIT_CHECK_FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
