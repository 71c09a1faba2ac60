"""Hostile requests: each gets one clear refusal, and nothing is computed, leaked or lost."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from cumulant.cli.serve import serve
from cumulant.core.errors import InputError
from cumulant.serve import application as app
from cumulant.serve.models import MOST_CHARACTERS, Models
from web_server import TOKEN, Client, serving, soak, tiny

TEXT = "A short text."


@pytest.fixture(scope="module")
def loaded():
    return tiny()


@pytest.fixture(scope="module")
def client(loaded):
    with serving(Models([loaded])) as client:
        yield client


JSON = {"Content_Type": "application/json", "X_Cumulant_Token": TOKEN}
BODY = json.dumps({"model": 0, "text": TEXT}).encode()


class TestWhoMayAsk:
    @pytest.mark.parametrize(
        ("change", "status"),
        [
            ({"Host": "evil.example"}, 421),
            ({"Host": "127.0.0.1"}, 421),
            ({"Host": ""}, 400),
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Sec_Fetch_Site": "cross-site"}, 403),
            ({"Sec_Fetch_Site": "same-site"}, 403),
            ({"X_Cumulant_Token": ""}, 403),
            ({"X_Cumulant_Token": TOKEN[:-1]}, 403),
            ({"X_Cumulant_Token": "é" * 32}, 403),
            ({"Content_Type": "text/plain"}, 415),
            ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
            ({"Content_Length": "99999999"}, 413),
        ],
    )
    def test_refusals(self, client, change, status):
        given = {**JSON, **change}
        if "Content_Length" in change:  # announced, not sent
            found = client.raw("POST", "/api/view", None, **given)
        else:
            found = client.raw("POST", "/api/view", BODY, **given)
        assert found[0] == status
        assert "access-control-allow-origin" not in {x.lower() for x in found[1]}

    def test_the_page_needs_the_token_too(self, client):
        assert client.raw("GET", "/")[0] == 403
        assert client.raw("GET", "/?token=wrong")[0] == 403
        assert client.raw("GET", f"/?token={TOKEN}")[0] == 200

    def test_a_preflight_is_not_answered(self, client):
        ask = {"Origin": "https://evil.example", "Access_Control_Request_Method": "POST"}
        status, headers, _ = client.raw("OPTIONS", "/api/view", None, **ask)
        assert status == 403
        assert not any(x.lower().startswith("access-control") for x in headers)

    @pytest.mark.parametrize("path", ["/etc/passwd", "/api/../../etc/passwd", "/api/_run", "/api/"])
    def test_other_paths_are_not_there(self, client, path):
        assert client.raw("POST", path, BODY, **JSON)[0] in (404, 405)

    def test_the_policy_allows_one_script_and_no_frame(self, client):
        _, headers, content = client.raw("GET", f"/?token={TOKEN}")
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert re.search(r"script-src 'sha256-[\w+/]+='", policy)
        assert "unsafe-eval" not in policy
        assert not re.search(rb"(src|href)=[\"']?(https?:)?//", content)
        assert headers["referrer-policy"] == "no-referrer"


class TestWhatIsAsked:
    @pytest.mark.parametrize(
        ("given", "word"),
        [
            ({}, "empty"),
            ({"text": "  "}, "empty"),
            ({"text": 5}, "empty"),
            ({"text": "x" * (MOST_CHARACTERS + 1)}, "characters"),
            ({"text": "a " * 1500}, "tokens"),
            ({"text": TEXT, "model": 1}, "model"),
            ({"text": TEXT, "model": "../other"}, "model"),
            ({"text": TEXT, "changes": "all"}, "changes"),
            ({"text": TEXT, "changes": [{"kind": "explode", "layer": 0}]}, "kind"),
            ({"text": TEXT, "changes": [{"kind": "skip", "layer": 2}]}, "layer"),
            ({"text": TEXT, "changes": [{"kind": "skip", "layer": True}]}, "layer"),
            ({"text": TEXT, "changes": [{"kind": "uniform", "layer": 0, "head": -1}]}, "head"),
            (
                {
                    "text": TEXT,
                    "changes": [{"kind": "temperature", "layer": 0, "head": 0, "value": 0}],
                },
                "temperature",
            ),
            ({"text": TEXT, "changes": [{"kind": "skip", "layer": 0}] * 33}, "at most"),
            ({"text": TEXT, "swaps": [[99, "dog"]]}, "swaps"),
            ({"text": TEXT, "swaps": [[0, ""]]}, "swaps"),
            ({"text": TEXT, "swaps": {"0": "dog"}}, "swaps"),
        ],
    )
    def test_bad_questions_say_what_is_wrong(self, client, given, word):
        status, found = client.ask("view", **given)
        assert status == 422
        assert word in found["error"]
        assert "/" not in found["error"]

    @pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 30000])
    def test_what_is_no_json_object_is_refused(self, client, body):
        assert client.raw("POST", "/api/view", body, **JSON)[0] == 400

    def test_text_is_text(self, client):
        status, found = client.ask("view", text="<script>alert(1)</script> & \u2028 \x00 😀")
        assert status == 200
        assert "<" in found["tokens"]

    def test_no_path_of_the_machine_in_any_answer(self, client):
        _, _, page = client.raw("GET", f"/?token={TOKEN}")
        _, view = client.ask("view", text=TEXT)
        for content in (page.decode(), json.dumps(view)):
            assert "/secret" not in content
            assert os.getcwd() not in content
        assert '"name":"tiny"' in page.decode()

    def test_a_fault_of_ours_says_little_and_is_logged(self, client, monkeypatch, caplog):
        def broken(*_):
            raise RuntimeError("/secret/folder")

        monkeypatch.setattr("cumulant.serve.models.text_view", broken)
        with caplog.at_level(logging.ERROR):
            status, found = client.ask("view", text="Another short text.")
        assert status == 500
        assert "/secret" not in found["error"]
        assert "/secret/folder" in caplog.text


class TestLoad:
    def test_a_long_line_is_refused_in_words(self, loaded, monkeypatch):
        monkeypatch.setattr(app, "WAITING", 1)
        hold = threading.Event()
        models = Models([loaded])
        monkeypatch.setattr(models, "view", lambda *_: hold.wait(20) and {})
        with serving(models) as client, ThreadPoolExecutor(6) as pool:
            waiting = [pool.submit(client.ask, "view", text=TEXT) for _ in range(6)]
            while sum(x.done() for x in waiting) < 4:
                time.sleep(0.02)
            hold.set()
            answers = [x.result() for x in waiting]
        refused = [found for status, found in answers if status == 503]
        assert len(refused) == 4
        assert "try again" in refused[0]["error"]

    def test_who_leaves_stops_the_work(self, loaded):
        models, stopped = Models([loaded]), threading.Event()

        def view(given, stop):
            if stop.wait(20):
                stopped.set()
            return {}

        models.view = view
        with serving(models) as client:
            host, port = client.host.split(":")
            lines = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in JSON.items())
            head = f"POST /api/view HTTP/1.1\r\nHost: {client.host}\r\n{lines}"
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
                time.sleep(0.2)
            assert stopped.wait(10)

    def test_many_requests_leave_memory_flat(self, loaded):
        assert soak(loaded, 250) < 15_000


def start(state, *arguments):
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    command = [sys.executable, "-m", "cumulant", "serve", "--no-browser", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, **pipes)
    return process, process.stdout.readline().strip()


def test_the_command_prints_its_address_and_survives_a_restart(tmp_path):
    process, address = start(tmp_path, "--port", "0")
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[0-9a-f]{48}", address)
        first = Client(address)
        status, before = first.ask("view", text=TEXT)
        assert status == 200
    finally:
        process.kill()
        process.wait()
    kept = tmp_path / "cumulant" / "serve-token"
    assert kept.stat().st_mode & 0o077 == 0
    port = first.host.split(":")[1]
    process, again = start(tmp_path, "--port", port)
    try:
        assert again == address
        assert first.ask("view", text=TEXT) == (200, before)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130, -signal.SIGINT)


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot listen"):
            serve(port=taken.getsockname()[1], host="127.0.0.1", browser=False)


def test_a_wider_address_is_warned_about(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("cumulant.cli.serve._run", lambda *_: None)
    serve(port=0, host="0.0.0.0", browser=False)
    assert "open to the network" in capsys.readouterr().err
