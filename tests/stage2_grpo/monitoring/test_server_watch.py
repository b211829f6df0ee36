"""A rollout server that dies is noticed, one that is only busy or just ending with its trainer is not."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.processes.owned_process import free_port
from stage2_grpo.monitoring.server_watch import ServerWatch, announce, is_dead


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def healthy_server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Healthy", (Health,), {})) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with healthy_server() as server:
        yield server


def test_a_server_is_dead_when_nobody_listens_or_its_engine_is_gone(server: ThreadingHTTPServer) -> None:
    address = f"127.0.0.1:{server.server_port}"
    assert not is_dead(address)
    server.RequestHandlerClass.status = 503  # type: ignore[attr-defined]
    assert is_dead(address)
    assert is_dead(f"127.0.0.1:{free_port()}")


def test_a_server_that_breaks_off_a_connection_is_not_dead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        threading.Thread(target=lambda: busy.accept()[0].close(), daemon=True).start()
        assert not is_dead(f"127.0.0.1:{busy.getsockname()[1]}")


def test_one_dead_server_of_several_is_named_after_a_while(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    alive, unreachable = f"127.0.0.1:{server.server_port}", f"127.0.0.1:{free_port()}"
    announce(tmp_path, [unreachable])
    watch = ServerWatch(tmp_path, pause=0.0, patience=0.05)
    watch.check("wait")  # what an earlier start announced does not count
    with healthy_server() as other:
        gone = f"127.0.0.1:{other.server_port}"
        announce(tmp_path, [alive, gone, unreachable])
        watch.check("wait")
    watch.check("wait")
    time.sleep(0.06)
    with pytest.raises(UserError, match=rf"server \(vLLM\) at {gone} has died.*trainer\.log; wait\.$"):
        watch.check("wait")


def test_a_server_that_comes_back_is_forgiven(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    watch = ServerWatch(tmp_path, pause=0.0, patience=0.05)
    announce(tmp_path, [f"127.0.0.1:{server.server_port}"])
    for status in (503, 200, 503):
        server.RequestHandlerClass.status = status  # type: ignore[attr-defined]
        watch.check("wait")
        time.sleep(0.06)
    with pytest.raises(UserError, match="has died"):
        watch.check("wait")
