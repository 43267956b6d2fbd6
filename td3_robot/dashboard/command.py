"""``td3-robot dashboard``: serves a web page that shows a training or a robot live."""

from __future__ import annotations

import argparse
import contextlib
import errno
import ipaddress
import os
import secrets
import signal
import socket
import ssl
import tempfile
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from td3_robot.errors import EXIT_GOOD, EndpointError, UsageError, exit_code_of
from td3_robot.recording.poses import read_links
from td3_robot.runtime.arguments import Parser, integer, run_or_config

_PORT = 8421
_EXAMPLES = """examples:
  td3-robot dashboard --run runs/walker2d --open
  td3-robot dashboard --config robot.yaml          watches a deployed policy server and robot
  td3-robot dashboard --runs runs                  compares all runs in a folder
  td3-robot dashboard --config robot.yaml --host robot.local --cert robot.pem --key robot.key

The command prints two addresses, each with a secret token. At the address after "view:", people can see the page.
At the address after "operate:", they can also stop and command the robots. Any number of people can open an address.
"""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    _check(options)
    if options.links:
        read_links(options.links)
    import uvicorn

    from td3_robot.dashboard.ending import Ending
    from td3_robot.dashboard.guard import OPERATOR, VIEWER, Guard

    with _listening(options.host, options.port) as listener, contextlib.ExitStack() as stack:
        port = listener.getsockname()[1]
        scheme = "https" if options.cert else "http"
        hosts = _hosts(options.host, port)
        tokens = {role: secrets.token_urlsafe(24) for role in (VIEWER, OPERATOR)}
        app = stack.enter_context(_app(options, lambda: server.should_exit))
        guard = Guard(Ending(app, lambda: server.should_exit), scheme, frozenset(hosts), tokens, f"td3_robot_{port}")
        settings = uvicorn.Config(
            guard,
            log_config=None,  # an access log would hold the token
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
            ssl_certfile=options.cert,
            ssl_keyfile=options.key,
        )
        with _naming_tls_files(options.cert, options.key):
            settings.load()
        server = uvicorn.Server(settings)
        view, operate = (f"{scheme}://{hosts[0]}/?token={token}" for token in tokens.values())
        # uvicorn first handles SIGINT and SIGTERM itself. After its shutdown, uvicorn raises the same signal again, now
        # for _leave. This handler raises SystemExit, so that the with blocks end.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _leave)
        print(f"operate: {operate}\nview: {view}", flush=True)
        if options.open:
            stack.enter_context(_opened(operate))
        server.run(sockets=[listener])
    return EXIT_GOOD


@contextlib.contextmanager
def _app(options: argparse.Namespace, closing: Callable[[], bool]) -> Iterator[Any]:
    """The web application that serves the pages.

    A live page stays attached to the nodes until the caller's ``with`` block ends.
    """
    from td3_robot.dashboard.recordings import Recordings, recordings_in, recordings_of_runs

    if options.runs is not None:
        from td3_robot.dashboard import compare

        if options.overrides:
            raise UsageError("--set needs --config")
        if not options.runs.is_dir():
            raise UsageError(f"--runs {str(options.runs)!r}: there is no such folder")
        title = options.runs.absolute().name
        yield compare.app(options.runs, Recordings(title, "Compare", lambda: recordings_of_runs(options.runs)))
        return
    from td3_robot.dashboard.live import Live
    from td3_robot.dashboard.server import Dashboard

    folder, config = run_or_config("dashboard", options)
    title = folder.path.absolute().name if folder else Path(options.config).name
    recordings = Recordings(title, "Live", lambda: recordings_in(folder.path)) if folder else None
    with contextlib.closing(Live(folder, config)) as live:
        live.start()
        yield Dashboard(title, live, folder, config, closing, recordings).app()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="td3-robot dashboard",
        description="Show a training or a robot on a web page.",
        epilog=_EXAMPLES,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", type=Path, metavar="DIR", help="folder of the run to show")
    where.add_argument("--config", metavar="FILE", help="configuration of the robot to show, if there is no run")
    where.add_argument("--runs", type=Path, metavar="FOLDER", help="compare all runs in this folder")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a key of FILE"
    )
    parser.add_argument(
        "--port",
        type=integer(most=65535),
        default=_PORT,
        metavar="P",
        help="port of the page; 0 for a free port (default: %(default)s)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="name or address under which browsers reach this machine; needs --cert and --key unless it is loopback "
        "(default: %(default)s)",
    )
    parser.add_argument("--cert", metavar="FILE", help="TLS certificate of HOST, in PEM format")
    parser.add_argument("--key", metavar="FILE", help="private key of the certificate, in PEM format")
    parser.add_argument("--links", metavar="FILE", help="draw your own robot with the links in this file")
    parser.add_argument("--open", action="store_true", help="open the operator's page in a browser")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError for wrong options, for example if other machines could read the page without TLS."""
    if (options.cert is None) != (options.key is None):
        raise UsageError("--cert and --key belong together: give both or none")
    for option, file in (("--cert", options.cert), ("--key", options.key)):
        if file is not None and not os.path.isfile(file):
            raise UsageError(f"{option} {file!r}: there is no such file")
    address = None
    with contextlib.suppress(ValueError):  # the host may be a name
        address = ipaddress.ip_address(options.host)
    if address is not None and address.is_unspecified:
        raise UsageError(f"--host is {options.host!r}; allowed: one name or address of this machine")
    loopback = options.host == "localhost" or (address is not None and address.is_loopback)
    if not loopback and options.cert is None:
        raise UsageError(f"--host {options.host!r} is not loopback, so it needs TLS: give --cert and --key")


@contextlib.contextmanager
def _naming_tls_files(cert: str | None, key: str | None) -> Iterator[None]:
    """If the block cannot use the certificate and the key, raise a UsageError that names the wrong file."""
    try:
        yield
    except OSError as error:  # an SSLError is an OSError
        for option, file in (("--cert", cert), ("--key", key)):
            if file is not None and not os.access(file, os.R_OK):
                raise UsageError(f"{option} {file!r}: this user may not read the file") from None
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise UsageError(f"--key {key!r}: this is not the key of the certificate {cert!r}") from None
        try:
            ssl.create_default_context(cafile=cert)
        except OSError:
            raise UsageError(f"--cert {cert!r}: the file holds no certificate in PEM format") from None
        why = "the file holds no private key in PEM format, or its password is wrong"
        raise UsageError(f"--key {key!r}: {why}") from None


def _hosts(host: str, port: int) -> list[str]:
    """The allowed values of the Host header. The first one is in the printed address."""
    names = [host, "localhost"] if host == "127.0.0.1" else [f"[{host.lower()}]" if ":" in host else host.lower()]
    ends = [f":{port}", ""] if port in (80, 443) else [f":{port}"]  # browsers leave out the usual port
    return [name + end for name in names for end in ends]


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Listen at an address. Raises EndpointError if this is not possible."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((address[0], port), family=family)
    except OSError as error:
        advice = "; --port 0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        raise EndpointError(f"--host {host} --port {port}: {error.strerror or error}{advice}") from None
    with listener:
        yield listener


@contextlib.contextmanager
def _opened(address: str) -> Iterator[None]:
    """Open the page in a browser.

    Other users can read the browser's arguments, so the arguments must not hold the token. The browser gets a private
    file, which redirects to the page.
    """
    with tempfile.TemporaryDirectory(prefix="td3-robot-dashboard-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "open.html"
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">', encoding="utf-8")
        webbrowser.open(file.as_uri())
        yield


def _leave(number: int, frame: Any) -> None:
    del frame
    raise SystemExit(exit_code_of(number))
