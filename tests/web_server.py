"""A running server for the tests: `cumulant serve` in a process of its own, or a thread of ours."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import torch
import uvicorn

import cumulant as cm
from cumulant.serve.application import application
from cumulant.serve.models import Models

TOKEN = "0123456789abcdef0123456789abcdef"


class Client:
    """Speaks to a server by its address."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.host, self.token, self.address = parts.netloc, parts.query.split("=")[1], address

    def raw(self, method: str, path: str, body: bytes | None = None, **headers: str):
        connection = http.client.HTTPConnection(self.host, timeout=60)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        given = {"Host": self.host, **{k.replace("_", "-"): v for k, v in headers.items()}}
        if body is not None:
            given.setdefault("Content-Length", str(len(body)))
        for name, value in given.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        try:
            content = answer.read()
        except ConnectionResetError:  # a refusal closes the connection without reading the body
            content = b""
        connection.close()
        return answer.status, dict(answer.getheaders()), content

    def ask(self, question: str, **given):
        body = json.dumps(given).encode()
        kind = {"Content_Type": "application/json", "X_Cumulant_Token": self.token}
        status, _, content = self.raw("POST", f"/api/{question}", body, **kind)
        return status, json.loads(content) if content else None


@contextlib.contextmanager
def serving(models: Models) -> Iterator[Client]:
    """The application on a free port of the loopback interface, in a thread."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(64)
    port = listening.getsockname()[1]
    app = application(models, token=TOKEN, hosts={f"127.0.0.1:{port}", f"localhost:{port}"})
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    for _ in range(200):
        if server.started:
            break
        time.sleep(0.02)
    try:
        yield Client(f"http://127.0.0.1:{port}/?token={TOKEN}")
    finally:
        server.should_exit = True
        thread.join(10)


def tiny() -> cm.lens.models.Loaded:
    """The demo model's tokenizer with a tiny model of its vocabulary: quick to run."""
    from transformers import BertConfig, BertModel

    tokenizer = cm.lens.load().tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=len(tokenizer), num_hidden_layers=2, **sizes)).eval()
    return cm.lens.models.Loaded(model, tokenizer, "/secret/folder/tiny", ())


def soak(loaded: cm.lens.models.Loaded, count: int) -> int:
    """How many kB the process grows by over so many requests, after some to warm up."""

    def resident() -> int:
        with open("/proc/self/status") as file:
            return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1])

    with serving(Models([loaded])) as client:
        for i in range(100):
            client.ask("view", text=f"Text {i}.")
        before = resident()
        for i in range(count):
            status, found = client.ask("view", text=f"Text {i} again, and more of it.")
            if status != 200:
                raise AssertionError(found)
        return resident() - before
