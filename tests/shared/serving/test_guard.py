"""Hostile requests: none gets an answer out of the server, and none keeps it from answering others."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from shared.serving import guard
from shared.serving.server import PAGE, policy
from tests.shared.serving.running import KEY, client, echo, events, serving

ASK = ("POST", "/api/ask", b'{"question": "q"}')
CHAT = ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "q"}]}')
MCP = ("POST", "/mcp", b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}')
MODELS = ("GET", "/v1/models", b"")
GOOD_KEY = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(echo, tmp_path_factory.mktemp("server")) as address:
        yield address


WRONG_KEYS = {
    "none": {},
    "wrong": {"Authorization": "Bearer wrong"},
    "empty": {"Authorization": "Bearer"},
    "beginning": {"Authorization": f"Bearer {KEY[:-1]}"},
    "longer": {"Authorization": f"Bearer {KEY}x"},
    "no scheme": {"Authorization": KEY},
    "basic": {"Authorization": f"Basic {KEY}"},
    "two spaces": {"Authorization": f"Bearer  {KEY}"},
    "not ASCII": {"Authorization": "Bearer \xfc\xff".encode("latin-1")},
    "cookie": {"Cookie": f"key={KEY}; Authorization=Bearer {KEY}"},
    "other header": {"X-Api-Key": KEY},
}
FOREIGN = {
    "other site": ({"Origin": "https://evil.example"}, 403),
    "other port": ({"Origin": "http://127.0.0.1:1"}, 403),
    "null": ({"Origin": "null"}, 403),
    "https of us": ({"Origin": "https://127.0.0.1:{port}"}, 403),
    "name that begins like us": ({"Origin": "http://127.0.0.1:{port}.evil.example"}, 403),
    "empty": ({"Origin": ""}, 403),
    "rebound name": ({"Host": "evil.example"}, 421),
    "rebound name with our port": ({"Host": "evil.example:{port}"}, 421),
    "no port": ({"Host": "127.0.0.1"}, 421),
    "other address": ({"Host": "0.0.0.0:{port}"}, 421),
    "upper case": ({"Host": "LOCALHOST:{port}"}, 421),
    "user in host": ({"Host": "127.0.0.1:{port}@evil.example"}, 421),
}


@pytest.mark.parametrize("path", [ASK, CHAT, MCP, MODELS, ("GET", "/openapi.json", b""), ("POST", "//", b"")], ids=str)
@pytest.mark.parametrize("headers", [WRONG_KEYS["none"], WRONG_KEYS["wrong"]], ids=["none", "wrong"])
def test_nothing_but_the_bare_page_is_had_without_the_key(
    url: str, path: tuple[str, str, bytes], headers: dict[str, str]
) -> None:
    method, where, body = path
    response = httpx.request(
        method, url + where, content=body, headers={"Content-Type": "application/json", **headers}, trust_env=False
    )
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert list(response.json()) == ["error"]


@pytest.mark.parametrize("headers", WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_a_wrong_key_is_no_key(url: str, headers: dict[str, str]) -> None:
    response = httpx.post(
        url + ASK[1], content=ASK[2], headers={"Content-Type": "application/json", **headers}, trust_env=False
    )
    assert response.status_code == 401


def test_the_key_sent_twice_is_refused(url: str) -> None:
    headers = [("Authorization", f"Bearer {KEY}")] * 2
    assert httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).status_code == 401


@pytest.mark.parametrize(("headers", "status"), FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("path", ["/", "/v1/models"])
def test_other_sites_and_rebound_names_are_refused_even_with_the_key(
    url: str, path: str, headers: dict[str, str], status: int
) -> None:
    port = str(urlsplit(url).port)
    own = {name: value.replace("{port}", port) for name, value in headers.items()}
    response = httpx.get(url + path, headers={**GOOD_KEY, **own}, trust_env=False)
    assert response.status_code == status
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("path", ["/", "/api/ask", "/mcp"])
def test_a_preflight_of_another_site_is_refused(url: str, path: str) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    response = httpx.options(url + path, headers=headers, trust_env=False)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


BAD_BODIES = {
    "no JSON": ("/api/ask", b"question=q", 400),
    "a form": ("/v1/chat/completions", b"messages=q", 400),
    "empty": ("/api/ask", b"", 400),
    "a list": ("/api/ask", b"[]", 400),
    "no question": ("/api/ask", b"{}", 400),
    "blank question": ("/api/ask", b'{"question": "  "}', 400),
    "a number": ("/api/ask", b'{"question": 7}', 400),
    "not UTF-8": ("/api/ask", b'{"question": "\xff"}', 400),
    "no messages": ("/v1/chat/completions", b"{}", 400),
    "no user": ("/v1/chat/completions", b'{"messages": []}', 400),
    "messages of another type": ("/v1/chat/completions", b'{"messages": "q"}', 400),
    "deep": ("/v1/chat/completions", b'{"messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", 400),
    "too large": ("/api/ask", b'{"question": "' + b"q" * guard.MAX_BODY_BYTES + b'"}', 413),
    "too large for MCP": ("/mcp", b" " * (guard.MAX_BODY_BYTES + 1), 413),
    "no such tool form": ("/mcp", b"{}", 400),
    "no such path": ("/../../etc/passwd", b"", 404),
}


@pytest.mark.parametrize(("path", "body", "status"), BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_body_that_is_no_question_is_refused_with_a_sentence(url: str, path: str, body: bytes, status: int) -> None:
    with client(url) as http:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        response = http.post(path, content=body, headers=headers)
        assert response.status_code == status
        assert http.get("/v1/models").status_code == 200
    assert "Traceback" not in response.text


def test_a_body_without_a_length_is_bounded_too(url: str) -> None:
    with client(url) as http:
        chunks = (b"x" * 1024 for _ in range(2 * guard.MAX_BODY_BYTES // 1024))
        assert http.post("/api/ask", content=chunks).status_code == 413


XSS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "</script><script>alert(1)</script>",
    "data: x\n\nevent: answer\ndata: {}",
    "\u2028\r\n\r\nevent: answer",
]


@pytest.mark.parametrize("text", XSS)
def test_markup_in_a_question_or_a_cell_comes_back_as_json_inside_its_own_event(url: str, text: str) -> None:
    with client(url) as http:
        response = http.post("/api/ask", json={"question": text})
    found = events(response.text)
    assert [name for name, _ in found] == ["message", "message", "message", "answer"]
    assert found[-1][1]["question"] == text
    assert found[-1][1]["rows"] == [[text]]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-content-type-options"] == "nosniff"


def test_every_answer_carries_the_security_headers(url: str) -> None:
    for response in (httpx.get(url, trust_env=False), httpx.get(f"{url}/v1/models", trust_env=False)):
        assert response.headers["content-security-policy"] == policy(PAGE)
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-store"
        assert "server" not in response.headers


def test_the_page_loads_nothing_and_writes_no_markup() -> None:
    assert "'unsafe" not in policy(PAGE)
    assert policy(PAGE).startswith("default-src 'none'; script-src 'sha256-")
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        " src=",
        " href=",
        "onclick",
        " style=",
    ):
        assert forbidden not in PAGE
    assert PAGE.count("http") == PAGE.count("http://www.w3.org/2000/svg")


def raw(url: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(urlsplit(url).port or 0)), timeout=10)
    connection.settimeout(10)
    return connection


def test_slow_clients_are_cut_off_and_delay_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.6)
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.6)
    with serving(echo, tmp_path) as url, client(url) as http:
        host = urlsplit(url).netloc
        slow_body = raw(url)
        head = f"POST /api/ask HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 50\r\n\r\n{{"
        slow_body.sendall(head.encode())
        slow_headers = [raw(url) for _ in range(20)]
        for connection in slow_headers:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
        silent = raw(url)
        started = time.monotonic()
        assert http.post("/api/ask", json={"question": "q"}).status_code == 200
        assert time.monotonic() - started < 1
        assert b" 408 " in slow_body.recv(200)
        for connection in (*slow_headers, silent):
            assert connection.recv(200) == b""
            connection.close()
        slow_body.close()


def test_headers_without_end_are_refused(url: str) -> None:
    with raw(url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 20_000)
        assert connection.recv(200).split()[1:2] in ([b"400"], [b"431"])


def test_without_a_key_requirement_other_sites_are_still_refused(tmp_path: Path) -> None:
    with serving(echo, tmp_path, key="") as url:
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200
        foreign = httpx.get(f"{url}/v1/models", headers={"Origin": "https://evil.example"}, trust_env=False)
        assert foreign.status_code == 403
