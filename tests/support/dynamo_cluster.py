"""A frontend of NVIDIA Dynamo and workers of ours, processes of this machine that find
one another through a folder; and the least HTTP client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from tests.support.triton_server import ROOT, free_ports, until

PYTHON = ROOT / ".dynamo" / "bin" / "python"
START_SECONDS = 60
MODEL = "lathe"
NOTHING: Mapping[str, str] = {}
SERVING = re.compile("Serving \\S+ on")
LOOPBACK = (
    "DYN_TCP_RPC_HOST",
    "DYN_TCP_RESPONSE_STREAM_HOST",
    "DYN_EVENT_PLANE_HOST",
    "DYN_SYSTEM_HOST",
)
FRONTEND = (
    "--http-host=127.0.0.1 --discovery-backend=file --request-plane=tcp "
    "--event-plane=zmq --router-mode=kv --migration-limit=2"
)
GAUGE = re.compile(r"^dynamo_component_gpu_cache_usage_percent\{.*\} (\S+)$", re.M)


class Process:
    """A program with a log, and a port of its own."""

    def __init__(
        self,
        folder: Path,
        name: str,
        arguments: list[str],
        port: int,
        python: Path = PYTHON,
        more: Mapping[str, str] = NOTHING,
    ) -> None:
        """``more``: variables of its environment."""
        self.log = folder / f"{name}.log"
        self.port = port
        environment = dict(os.environ, DYN_FILE_KV=str(folder / "discovery"))
        environment |= dict.fromkeys(LOOPBACK, "127.0.0.1")
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment["DYN_SDK_DISABLE_ANSI_LOGGING"] = "1"
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["DYN_SYSTEM_PORT"] = "-1" if name == "frontend" else str(port)
        environment |= more
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(python), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self, seconds: float = 30) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Worker(Process):
    @property
    def requests(self) -> int:
        """Requests for answers that came here."""
        lines = [line for line in self.said.splitlines() if "request received" in line]
        return sum("endpoint=generate" in line.replace('"', "") for line in lines)

    @property
    def used(self) -> float:
        """The share of its cache that running sequences hold, as it reports."""
        found = GAUGE.search(get(self.port, "/metrics"))
        assert found, "no such gauge"
        return float(found[1])


class Cluster:
    """``worker`` starts one. All end with ``stop``."""

    def __init__(
        self, folder: Path, python: Path = PYTHON, seconds: float = START_SECONDS
    ) -> None:
        """``seconds``: until a worker or an answer must be there."""
        self.folder, self.python, self.seconds = folder, python, seconds
        (folder / "discovery").mkdir()
        [self.port] = free_ports(1)
        arguments = ["-m", "dynamo.frontend", f"--http-port={self.port}"]
        arguments += FRONTEND.split()
        self.frontend = Process(folder, "frontend", arguments, self.port, python)
        self.processes = [self.frontend]

    def worker(self, name: str, engine: Path, mode: str = "agg") -> Worker:
        options = ["--mode", mode, "--threads", "1"]
        started = self.begin(name, engine, options)
        self.wait(started)
        return started

    def begin(
        self,
        name: str,
        engine: Path,
        options: list[str],
        model: str = MODEL,
        more: Mapping[str, str] = NOTHING,
    ) -> Worker:
        """``worker`` without waiting for it."""
        arguments = ["-m", "kvlathe", "dynamo", str(engine), *options]
        arguments += ["--served-model-name", model]
        port = low_port()
        started = Worker(self.folder, name, arguments, port, self.python, more)
        self.processes.append(started)
        return started

    def wait(self, started: Worker) -> None:
        """Until the frontend can know it."""

        def known() -> bool:
            serving = SERVING.search(started.said) is not None
            return serving or started.process.poll() is not None

        known_in_time = until(known, self.seconds)
        assert known_in_time and started.process.poll() is None, started.said[-4000:]

    def ready(self, model: str = MODEL) -> None:
        """Wait until requests reach the workers."""

        def answers() -> bool:
            try:
                with self.open(model=model, prompt="a", max_tokens=1) as response:
                    return response.status not in (404, 503)
            except OSError:
                return False

        assert until(answers, self.seconds), self.frontend.said[-4000:]

    def stop(self) -> None:
        for process in self.processes:
            if process.process.poll() is None:
                process.process.kill()
            process.process.wait()

    # -- requests ----------------------------------------------------------------------
    def open(self, **body: Any) -> http.client.HTTPResponse:  # noqa: ANN401
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        text = json.dumps({"model": MODEL, "temperature": 0} | body)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", text, headers)
        return connection.getresponse()

    def complete(self, **body: Any) -> dict[str, Any]:  # noqa: ANN401
        with self.open(**body) as response:
            said = response.read()
            assert response.status == 200, said
            return json.loads(said)["choices"][0]

    def text(self, **body: Any) -> str:  # noqa: ANN401
        return self.complete(**body)["text"]

    def stream(self, **body: Any) -> Generator[str, None, None]:  # noqa: ANN401
        """The answer's text as it comes. Closing it closes the connection."""
        with self.open(stream=True, **body) as response:
            assert response.status == 200, response.read()
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if not data.startswith("{"):
                    continue
                found = json.loads(data)
                assert "choices" in found, found
                for choice in found["choices"]:
                    yield choice["text"] or ""


def low_port() -> int:
    """A free one that 15 bits hold: Dynamo's system server takes no other."""
    for port in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    with connection.getresponse() as response:
        return response.read().decode()
