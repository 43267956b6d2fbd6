"""``td3-robot keys``: the CURVE keys of this machine, and whom it lets in."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from td3_robot.errors import EXIT_GOOD
from td3_robot.runtime.arguments import Parser
from td3_robot.topics import LINKS
from td3_robot.transport.keys import (
    CLIENT,
    REVOCATION_TIME,
    ROLES,
    SERVER,
    KeyFolder,
    default_folder,
    named,
    read_public,
)

_EXAMPLES = """examples:
  on the robot         td3-robot keys create robot-7
  on the workstation   td3-robot keys create workstation
  then exchange the two identity.public files, and
  on the robot         td3-robot keys allow workstation workstation.public --server learner
  on the workstation   td3-robot keys allow robot-7 robot-7.public
  to command the robot from there
  on the robot         td3-robot keys allow workstation workstation.public --role operator
  at both, in the configuration   endpoints: {keys: ~/.config/td3-robot/keys}
  later                td3-robot keys revoke robot-7
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="td3-robot keys",
        description="Make this machine's keys, and say which other keys may connect to it.",
        epilog=_EXAMPLES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    create = commands.add_parser("create", help="draw this machine's key pair")
    create.add_argument("name", metavar="NAME", help="what other machines will know it as")
    allow = commands.add_parser("allow", help="let a key connect to this machine, or expect it of a server")
    allow.add_argument("name", metavar="NAME", help="what to know it as here")
    allow.add_argument("key", metavar="KEY", help="the public key in quotes, or an identity.public file")
    kind = allow.add_mutually_exclusive_group()
    kind.add_argument(
        "--role",
        choices=(CLIENT, *ROLES),
        default=CLIENT,
        help="let it in as this; given again, as both (default: %(default)s, which is every role but operator)",
    )
    kind.add_argument("--server", choices=LINKS, help="do not let it in: expect it of the server of this link")
    shown = commands.add_parser("list", help="this machine's key, and those it knows")
    shown.add_argument("--json", action="store_true", help="as one JSON object")
    revoke = commands.add_parser("revoke", help="forget a key; processes that run cut it off")
    revoke.add_argument("name", metavar="NAME", help="as given to allow")
    for command in (create, allow, shown, revoke):
        command.add_argument(
            "--keys",
            type=Path,
            metavar="DIR",
            help="folder of keys (default: td3-robot/keys in your configuration folder)",
        )
    options = parser.parse_args(arguments)
    folder = named(options.keys or default_folder())
    {"create": _create, "allow": _allow, "list": _list, "revoke": _revoke}[options.command](folder, options)
    return EXIT_GOOD


def _create(folder: KeyFolder, options: argparse.Namespace) -> None:
    identity = folder.create(options.name)
    print(f"secret key: {folder.secret_file} (stays here)")
    print(f"public key: {folder.public_file}")
    print(f"on the other machine: td3-robot keys allow {identity.name} '{identity.public}'")


def _allow(folder: KeyFolder, options: argparse.Namespace) -> None:
    role = SERVER + options.server if options.server else options.role
    folder.allow(options.name, read_public(options.key), role)
    if options.server:
        print(f"{options.name} is the server of {options.server}")
    else:
        print(f"{options.name} may connect as {'any role but operator' if role == CLIENT else role}")


def _list(folder: KeyFolder, options: argparse.Namespace) -> None:
    identity, entries = folder.identity(), folder.entries()
    if options.json:
        rows = [{"name": entry.name, "key": entry.key, "roles": list(entry.roles)} for entry in entries.values()]
        own = {"name": identity.name, "key": identity.public}
        print(json.dumps({"folder": str(folder.path), "identity": own, "allowed": rows}))
        return
    print(f"{identity.name:<20} {identity.public}  this machine")
    for entry in entries.values():
        print(f"{entry.name:<20} {entry.key}  {', '.join(entry.roles)}")


def _revoke(folder: KeyFolder, options: argparse.Namespace) -> None:
    folder.revoke(options.name)
    print(f"{options.name} is forgotten; processes that run let go of it within {REVOCATION_TIME} s")
