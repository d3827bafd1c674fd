"""A real Triton server for tests: the one that scripts/triton_env.sh sets up, on free
ports of this machine."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / ".triton" / "serve"
START_SECONDS = 60


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def until(true: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether ``true()`` holds, now or soon."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


class Server:
    def __init__(self, repository: Path) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        names = ("http", "grpc", "metrics")
        ports = [f"--{name}-port={getattr(self, f'{name}_port')}" for name in names]
        addresses = [f"--{name}-address=127.0.0.1" for name in names]
        self.log = repository.parent / f"{repository.name}.log"
        with self.log.open("wb") as log:
            command = [
                str(SERVE),
                str(repository),
                *ports,
                *addresses,
                "--exit-timeout-secs=5",
            ]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if self.get("/v2/health/ready")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self.stop()
        raise AssertionError(
            self.log.read_text(encoding="utf-8", errors="replace")[-4000:]
        )

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str, port: int = 0) -> tuple[int, str]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", port or self.http_port, timeout=30
        )
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()

    def gauge(self, name: str) -> float:
        """One of our gauges in Triton's /metrics."""
        found = re.search(
            rf"^{name}{{[^}}]*}} (\S+)$",
            self.get("/metrics", self.metrics_port)[1],
            re.MULTILINE,
        )
        assert found, name
        return float(found[1])

    def idle(self) -> bool:
        return not self.gauge("kvlathe_num_requests_running") and not self.gauge(
            "kvlathe_num_requests_waiting"
        )

    def generate(self, model: str, **inputs: Any) -> tuple[int, dict[str, Any]]:  # noqa: ANN401
        """POST /generate: one JSON answer."""
        status, body = self._post(f"/v2/models/{model}/generate", inputs)
        return status, json.loads(body)

    def generate_stream(self, model: str, **inputs: Any) -> list[dict[str, Any]]:  # noqa: ANN401
        """POST /generate_stream: server-sent events."""
        _, body = self._post(f"/v2/models/{model}/generate_stream", inputs)
        return [
            json.loads(line.removeprefix("data: "))
            for line in body.splitlines()
            if line
        ]

    def _post(self, path: str, inputs: dict[str, Any]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=60)
        connection.request(
            "POST", path, json.dumps(inputs), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        return response.status, response.read().decode()
