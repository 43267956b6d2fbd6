"""Every error that td3-robot raises on purpose, as one tree.

Td3RobotError                 a sentence that a person can act on; exit code 2 if nothing else is given
├── ConfigError               a configuration key, value or file is wrong
├── UsageError                a command line is wrong
├── BundleError               a policy, weights or checkpoint file is damaged, hostile or for another robot
├── DivergenceError           training has diverged; more updates would destroy the policy
├── ProtocolError             bytes from a peer are not a message of this protocol
├── HandshakeError            a peer speaks another version, robot or configuration
├── EndpointError             an address cannot be bound or is not allowed
├── KeysError                 a key, key folder or allow-list is missing, damaged or open to others
├── LifecycleError            the state of a node does not allow a command (exit code: 1)
├── SessionError              a file is damaged, not a recording, or of another protocol version
├── RunFolderError            a run folder is taken, missing or not a run
└── NodeError                 a process of a launch ended for good (exit code: its own, or 1)
"""

from __future__ import annotations

EXIT_GOOD = 0
EXIT_CHECK_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Td3RobotError(Exception):
    """An expected failure whose text is one line naming the thing, the value and what is allowed."""

    exit_code = EXIT_USAGE


class ConfigError(Td3RobotError):
    """A configuration names an unknown key, holds a value that is not allowed or contradicts itself."""


class UsageError(Td3RobotError):
    """A command line is wrong."""


class BundleError(Td3RobotError):
    """A policy bundle, weights message or checkpoint is damaged, hostile or for another robot."""


class DivergenceError(Td3RobotError):
    """Training has diverged; the text names the sign and what is kept."""


class ProtocolError(Td3RobotError):
    """Bytes from a peer are not a valid message; ``kind`` names the counter for it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class HandshakeError(Td3RobotError):
    """One side of a link refuses the other; the text says what differs."""


class EndpointError(Td3RobotError):
    """An endpoint is busy, malformed or not allowed without keys."""


class KeysError(Td3RobotError):
    """A key, key folder or allow-list is missing, malformed, damaged, or open to other users."""


class LifecycleError(Td3RobotError):
    """A node refuses a command that its state or its policies do not allow."""

    exit_code = EXIT_CHECK_FAILED


class SessionError(Td3RobotError):
    """A recorded session is damaged, not a session, or of another protocol version."""


class RunFolderError(Td3RobotError):
    """A run folder holds a run already, or lacks the requested one."""


class NodeError(Td3RobotError):
    """A supervised process cannot run, or ended more often than its restart rule allows; with its exit code."""

    def __init__(self, text: str, exit_code: int = EXIT_CHECK_FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
