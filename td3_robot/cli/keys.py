"""``td3-robot keys``: the CURVE keys of this machine, and the machines that may connect to this machine."""

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
  then copy each identity.public to the other machine as NAME.public, and run
  on the robot         td3-robot keys allow workstation workstation.public --server learner
  on the workstation   td3-robot keys allow robot-7 robot-7.public
  to command the robot from the workstation, also run
  on the robot         td3-robot keys allow workstation workstation.public --role operator
  on both, in the configuration   endpoints: {keys: ~/.config/td3-robot/keys}
  to forget a key      td3-robot keys revoke robot-7
"""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    folder = named(options.keys or default_folder())
    {"create": _create, "allow": _allow, "list": _list, "revoke": _revoke}[options.command](folder, options)
    return EXIT_GOOD


def _parser() -> Parser:
    parser = Parser(
        prog="td3-robot keys",
        description="Make this machine's keys, and choose which other machines may connect to this machine.",
        epilog=_EXAMPLES,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    create = commands.add_parser("create", help="make this machine's key pair")
    create.add_argument("name", metavar="NAME", help="name of this machine")
    allow = commands.add_parser(
        "allow", help="let the owner of a key connect to this machine, or set the key of a server"
    )
    allow.add_argument("name", metavar="NAME", help="your name for the other machine")
    allow.add_argument("key", metavar="KEY", help="the public key in quotes, or an identity.public file")
    kind = allow.add_mutually_exclusive_group()
    kind.add_argument(
        "--role",
        choices=(CLIENT, *ROLES),
        default=CLIENT,
        help="role of the other machine (default: %(default)s, which is every role except operator); "
        "to add another role, run the command again with that role",
    )
    kind.add_argument(
        "--server",
        choices=LINKS,
        help="the server of this link must have KEY; --server does not let the owner of KEY connect to this machine",
    )
    shown = commands.add_parser("list", help="show this machine's key and the known keys")
    shown.add_argument("--json", action="store_true", help="print one JSON object")
    revoke = commands.add_parser("revoke", help="forget a key; running processes disconnect its owner")
    revoke.add_argument("name", metavar="NAME", help="the NAME that you used in td3-robot keys allow")
    for command in (create, allow, shown, revoke):
        command.add_argument(
            "--keys",
            type=Path,
            metavar="DIR",
            help="folder of keys (default: td3-robot/keys in your configuration folder)",
        )
    return parser


def _create(folder: KeyFolder, options: argparse.Namespace) -> None:
    identity = folder.create(options.name)
    print(f"secret key: {folder.secret_file} (stays here)")
    print(f"public key: {folder.public_file}")
    print(f"on the other machine: td3-robot keys allow {identity.name} '{identity.public}'")


def _allow(folder: KeyFolder, options: argparse.Namespace) -> None:
    role = SERVER + options.server if options.server else options.role
    folder.allow(options.name, read_public(options.key), role)
    if options.server:
        print(f"{options.name} is the server of the link {options.server}")
    else:
        print(f"{options.name} may connect as {'any role except operator' if role == CLIENT else role}")


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
    print(f"{options.name} is forgotten; running processes disconnect it within {REVOCATION_TIME} s")
