"""The dashboard's server over real HTTP: who may read and who may command, what it sends, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from td3_robot.cli.main import main
from td3_robot.dashboard.command import _hosts
from tests.dashboard.conftest import RECORDS, Site, make_run


@pytest.fixture
def site(serve: Callable[..., Site], tmp_path: Path) -> Site:
    make_run(tmp_path / "run")
    return serve("--run", "run")


def test_a_request_needs_the_token_and_must_come_from_this_site(site: Site) -> None:
    status, headers, body = site.get(f"/?token={site.token}")
    assert status == 200
    assert b"<title>td3-robot</title>" in body
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    good = {"Cookie": cookie.split(";")[0]}
    here = f"127.0.0.1:{site.port}"
    assert site.get("/metrics", good)[0] == 200
    assert site.get("/metrics", {**good, "Host": f"localhost:{site.port}"})[0] == 200
    assert site.get("/metrics", {**good, "Origin": f"http://{here}"})[0] == 200
    refused: list[tuple[str, dict[str, str]]] = [
        ("/metrics", {}),
        ("/", {}),
        ("/?token=", {}),
        ("/?token=wrong", good),
        ("/?token=%C3%A9", {}),
        ("/static/page.js", {}),
        ("/events", {"Cookie": f"td3_robot_{site.port}=wrong"}),
        ("/metrics", {**good, "Host": f"evil.example:{site.port}"}),  # DNS rebinding
        ("/metrics", {**good, "Host": "127.0.0.1"}),
        ("/metrics", {**good, "Host": "127.0.0.1:1"}),
        ("/metrics", {**good, "Origin": "http://evil.example"}),
        ("/metrics", {**good, "Origin": "null"}),
        ("/metrics", {**good, "Origin": "http://127.0.0.1:1"}),
        ("/metrics", {**good, "Origin": f"https://{here}"}),
        ("/metrics", {**good, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}),
        ("/metrics", {**good, "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}),
    ]
    for path, headers in refused:
        status, answered, body = site.get(path, headers)
        assert status == 403, (path, headers)
        assert body.startswith(b"refused: ")
        assert "set-cookie" not in answered
        assert "default-src 'none'" in answered["content-security-policy"]
    assert site.get("/metrics", good, "POST")[0] == 403  # no Origin
    assert site.get("/static/../command.py", good)[0] == 404


def test_a_request_with_two_host_headers_is_refused(site: Site) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=30)
    connection.putrequest("GET", f"/?token={site.token}", skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{site.port}")
    connection.putheader("Host", "evil.example")
    connection.endheaders()
    assert connection.getresponse().status in (400, 403)
    connection.close()


def test_metrics_and_a_stream_are_served_for_an_ended_run(site: Site) -> None:
    cookie = site.cookie()
    found = json.loads(site.get("/metrics", cookie)[2])
    train = [record for record in RECORDS if record["kind"] == "train"]
    assert found["train"]["return_mean"] == [record["return_mean"] for record in train]
    assert found["train"]["actor_loss"] == [3.0, None]
    assert found["evaluation"]["eval_return_mean"] == [10.0, 123.456789]
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", site.port, timeout=30)) as connection:
        connection.request("GET", "/events", headers=cookie)
        stream = connection.getresponse()
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [stream.readline().decode().rstrip() for _ in range(4)]
        assert lines[:2] == ["retry: 1000", "event: history"]
        assert json.loads(lines[2].removeprefix("data: ")) is not None
        live: Any = {}
        while "problem" not in live:
            line = stream.readline().decode()
            live = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else live
        assert "start its training first" in live["problem"]
        site.process.interrupt()  # the server ends although a viewer is connected
        assert site.process.finish(30) == 130, site.process.output()
        assert site.token not in site.process.output().replace(site.address, "")


def test_other_viewers_are_served_while_one_viewer_reads_nothing(site: Site) -> None:
    """29 viewers read the stream. One more viewer reads nothing after the headers of the answer."""
    cookie = site.cookie()
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(30):
            connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
            stack.enter_context(contextlib.closing(connection))
            connection.request("GET", "/events", headers=cookie)
            streams.append(connection.getresponse())
        for stream in streams[:-1]:
            lines = (stream.readline() for _ in range(100))
            assert next(line for line in lines if b'"problem":' in line)
        assert site.get("/metrics", cookie)[0] == 200


def test_sigterm_ends_the_server(site: Site) -> None:
    site.process.process.send_signal(signal.SIGTERM)
    assert site.process.finish(30) == 143, site.process.output()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--host", "0.0.0.0"], "--host is '0.0.0.0'; allowed: one name or address of this machine"),
        (["--host", "192.0.2.1"], "--host '192.0.2.1' is not loopback, so it needs TLS: give --cert and --key"),
        (["--host", "robot.local"], "--host 'robot.local' is not loopback"),
        (["--cert", "x.pem"], "--cert and --key belong together"),
        (["--cert", "x.pem", "--key", "y.pem"], "--cert 'x.pem': there is no such file"),
        (["--port", "70000"], "--port is 70000; allowed: whole numbers from 0 to 65535"),
    ],
)
def test_wrong_hosts_certificates_and_ports_are_refused(
    arguments: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    assert main(["dashboard", "--run", str(tmp_path / "run"), *arguments]) == 2
    assert error in capsys.readouterr().err


def test_the_host_header_is_compared_without_regard_to_capitals() -> None:
    assert _hosts("FE80::1", 8080) == ["[fe80::1]:8080"]
    assert _hosts("Robot.Local", 443) == ["robot.local:443", "robot.local"]


def test_only_an_operator_may_command(site: Site) -> None:
    here = {"Origin": f"http://127.0.0.1:{site.port}"}
    cookies = [site.get(address.split(str(site.port))[1])[1]["set-cookie"] for address in (site.address, site.operate)]
    viewer, operator = ({**here, "Cookie": cookie.split(";")[0]} for cookie in cookies)
    assert json.loads(site.get("/about", viewer)[2])["role"] == "viewer"
    assert json.loads(site.get("/about", operator)[2])["role"] == "operator"

    def act(headers: dict[str, str], body: bytes) -> tuple[int, str]:
        status, _, answer = site.get("/act", headers, "POST", body)
        return status, answer.decode()

    stop = b'{"verb": "estop"}'
    assert act(viewer, stop) == (
        403,
        "refused: to command the robots, open the address that td3-robot dashboard printed after 'operate:'\n",
    )
    assert act({"Cookie": operator["Cookie"]}, stop) == (403, "refused: the request has no Origin header\n")
    assert act({**operator, "Origin": "http://evil.example"}, stop)[0] == 403
    assert site.get("/act", operator)[0] == 405
    for wrong in (b"", b"[]", b'{"verb": "shutdown"}', b'{"verb": "estop", "other": 1}', b"\xff"):
        status, text = act(operator, wrong)
        assert (status, text[:9]) == (400, "refused: "), wrong
    assert act(operator, b" " * 10_000)[0] == 413
    status, text = act(operator, stop)
    assert status == 200
    assert json.loads(text)["done"] is False
    assert "start its training first" in json.loads(text)["text"]


def make_certificate(folder: Path) -> None:
    """Make ``cert.pem`` and ``key.pem`` in a folder, for localhost."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl, which makes the certificate")
    files = ("-keyout", "key.pem", "-out", "cert.pem")
    words = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    subprocess.run(["openssl", "req", "-x509", *words, *files, *names], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("cert", "key", "error"),
    [
        ("text", "key.pem", "--cert 'text': the file holds no certificate in PEM format"),
        ("key.pem", "key.pem", "--cert 'key.pem': the file holds no certificate in PEM format"),
        ("cert.pem", "text", "--key 'text': the file holds no private key in PEM format, or its password is wrong"),
        ("cert.pem", "other/key.pem", "--key 'other/key.pem': this is not the key of the certificate 'cert.pem'"),
    ],
)
def test_a_file_without_certificate_or_key_is_refused_before_an_address_is_printed(
    cert: str, key: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("uvicorn", reason="needs td3-robot[dashboard], which is not installed")
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    (tmp_path / "text").write_text("no PEM")
    (tmp_path / "other").mkdir()
    make_certificate(tmp_path)
    make_certificate(tmp_path / "other")
    assert main(["dashboard", "--run", "run", "--port", "0", "--cert", cert, "--key", key]) == 2
    assert capsys.readouterr() == ("", f"td3-robot dashboard: {error}\n")


def test_with_a_certificate_the_page_uses_tls(serve: Callable[..., Site], tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    make_certificate(tmp_path)
    site = serve("--run", "run", "--host", "localhost", "--cert", "cert.pem", "--key", "key.pem")
    assert site.address.startswith("https://localhost:")
    trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    connection = http.client.HTTPSConnection("localhost", site.port, timeout=30, context=trusted)
    connection.request("GET", f"/?token={site.token}")
    answer = connection.getresponse()
    assert answer.status == 200
    assert "; Secure" in answer.headers["set-cookie"]
    connection.close()
    with socket.create_connection(("localhost", site.port), timeout=30) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in plain.recv(1000)  # no answer without TLS
