"""What a foreign page, a careless client or a training text may try."""

import base64
import io
import json
import math
import select
import shutil
import socket
import struct
import zlib
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import eigentrace as et
from eigentrace.disk.tensors import read_tensors
from eigentrace.errors import BusyError, InputError
from eigentrace.page.access import MOST_BYTES, MOST_HELD, hosts_of
from eigentrace.page.server import run_server
from eigentrace.page.uploads import read_image
from eigentrace.rendering import Custom, Texts
from eigentrace.store.folder import Folder
from tests.helpers.expecting import expect_mentions, refused
from tests.helpers.runs import data, fit
from tests.helpers.serving import HEADERS, TOKEN, client, started

ADDRESSES = (
    "/",
    "/static/app.js",
    "/api/overview",
    "/api/examples",
    "/api/examples/0",
    "/api/nothing",
    "/static/no.js",
)


@pytest.fixture(scope="module")
def asked(scored):
    return client(scored, show=Texts(["text"] * 60))


@pytest.mark.parametrize("path", ADDRESSES)
@pytest.mark.parametrize("host", ["evil.example", "testserver.evil.example", "testserver:80", "127.0.0.1.evil", ""])
def test_foreign_hosts_are_refused_everywhere(asked, path, host):
    answer = asked.get(path, headers={"host": host})
    assert answer.status_code == 400
    expect_mentions(answer.json()["error"], ["testserver", repr(host)])


@pytest.mark.parametrize("path", ADDRESSES)
def test_every_answer_has_the_headers(asked, path):
    headers = asked.get(path).headers
    assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == ("no-cache" if path.startswith("/static") else "no-store")
    assert "access-control-allow-origin" not in headers


HOMES = ("static", "api/examples", "api/image", "api/groups", "api/explain")
TRAVERSALS = (
    "../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "....//....//etc/passwd",
    "..\\..\\etc\\passwd", "/etc/passwd", "%00", "%2fetc%2fpasswd", "vendor/../../app.py", "file:///etc/passwd",
)  # fmt: skip


@pytest.mark.parametrize("path", TRAVERSALS)
@pytest.mark.parametrize("home", HOMES)
def test_no_path_reaches_the_file_system(asked, home, path):
    answer = asked.get(f"/{home}/{path}")
    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text
    assert "import" not in answer.text


@pytest.mark.parametrize("given", [{}, {"X-Token": ""}, {"X-Token": "wrong"}, {"X-Token": TOKEN[:-1]}])
@pytest.mark.parametrize("path", ["/api/decisions", "/api/undo", "/api/ask"])
def test_writing_needs_the_token(asked, scored, path, given):
    body = {"rows": [1], "decision": "drop", "text": "a"}
    assert asked.post(path, json=body, headers=given).status_code == 403
    assert asked.post(f"{path}?token={TOKEN}", json=body, headers=given).status_code == 403
    assert asked.put(path, json=body, headers=given).status_code == 403
    assert not (scored / "decisions.jsonl").exists()


def test_the_page_is_given_the_token_and_nobody_else(asked):
    assert f'<meta name="token" content="{TOKEN}">' in asked.get("/").text
    assert TOKEN not in asked.get("/api/overview").text


BODIES = {
    "nothing": b"",
    "no JSON": b"{rows: [1]}",
    "a list": b"[1, 2]",
    "cut": b'{"rows": [1',
    "not UTF-8": b'{"rows": "\xff\xfe"}',
    "deep": b"[" * 200_000,
    "NaN": b'{"rule": {"by": "loss", "above": NaN}, "decision": "drop"}',
    "infinite": b'{"rule": {"by": "loss", "above": 1e999}, "decision": "drop"}',
    "a long number": b'{"rows": [' + b"9" * 5000 + b'], "decision": "drop"}',
    "a large number": b'{"rows": [99999999999999999999], "decision": "drop"}',
    "a fraction": b'{"rows": [1.5], "decision": "drop"}',
    "a truth": b'{"rows": [true], "decision": "drop"}',
    "text": b'{"rows": ["1"], "decision": "drop"}',
    "below": b'{"rows": [-1], "decision": "drop"}',
    "beyond": b'{"rows": [60], "decision": "drop"}',
    "no such word": b'{"rows": [1], "decision": "burn"}',
    "no word": b'{"rows": [1]}',
    "rows and a rule": b'{"rows": [1], "rule": {"above": 1}, "decision": "drop"}',
    "a rule of nothing": b'{"rule": {}, "decision": "drop"}',
    "a rule by code": b'{"rule": {"by": "__class__", "above": 1}, "decision": "drop"}',
    "a rule of more": b'{"rule": {"by": "loss", "above": 1, "path": "/etc"}, "decision": "drop"}',
    "a class below": b'{"rows": [1], "decision": "relabel", "new_label": -1}',
    "a class of text": b'{"rows": [1], "decision": "relabel", "new_label": "2"}',
    "a class beyond": b'{"rows": [1], "decision": "relabel", "new_label": 4294967296}',
}


@pytest.mark.parametrize("name", BODIES)
def test_bad_bodies_are_told_and_change_nothing(asked, scored, name):
    answer = asked.post("/api/decisions", content=BODIES[name], headers=HEADERS)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]
    assert not (scored / "decisions.jsonl").exists()


QUERIES = (
    "limit=0", "limit=-1", "limit=201", "limit=x", "offset=-1", "offset=1e9", "low=-0.1", "high=2", "low=nan",
    "above=nan", "below=inf", "order=random()", "decision=burn", "label=three", "sort=__dict__", "sort=source",
    "sort=../loss", "group=nothing", "group=loss:1", "within=loss", "within=loss:a:b", "within=nothing:1:2",
    "disagree=perhaps", f"search={'a' * 501}", "&".join(["within=loss:0:1"] * 9),
)  # fmt: skip


@pytest.mark.parametrize("query", QUERIES)
def test_bad_queries_are_told(asked, query):
    answer = asked.get(f"/api/examples?{query}")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]


@pytest.mark.parametrize("path", ["examples/60", "examples/-1", "explain/60", "explain/-1", "image/60"])
def test_rows_that_are_not_there(asked, path):
    answer = asked.get(f"/api/{path}")
    assert answer.status_code == 404
    expect_mentions(answer.json()["error"], [path.split("/")[1], 0, 59])


def test_large_bodies_are_refused_before_they_are_read(points):
    with started(points) as server:
        with socket.create_connection((server.place.hostname, server.place.port), timeout=120) as raw:
            head = f"POST /api/ask HTTP/1.1\r\nHost: {server.place.netloc}\r\nX-Token: {TOKEN}\r\n"
            raw.sendall(f"{head}Content-Length: {10**12}\r\n\r\n".encode())
            assert raw.recv(1000).startswith(b"HTTP/1.1 413")  # and nothing of it was sent
        with socket.create_connection((server.place.hostname, server.place.port), timeout=120) as raw:
            raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            chunk, sent = b"100000\r\n" + b"x" * 2**20 + b"\r\n", 0
            try:
                while sent < 40 * 2**20:
                    raw.sendall(chunk)
                    sent += 2**20
            except OSError:
                pass
            assert sent < 40 * 2**20  # the server did not take it all
        status, answer = server.ask("GET", "/api/examples/0")
        assert (status, answer["row"]) == (200, 0)


def test_a_chunked_body_is_counted(asked):
    answer = asked.post("/api/ask", content=(b"x" * 2**20 for _ in range(MOST_BYTES // 2**20 + 2)), headers=HEADERS)
    assert answer.status_code == 413


def test_numbers_that_are_none_and_long_ones_become_null_and_text(tmp_path):
    columns = {"score": np.array([np.nan, np.inf, -np.inf, *range(57)]), "big": np.arange(60) + 2**60}
    run = et.score(fit(), data(), tmp_path / "run", columns=columns).path
    folder = Folder(run)
    (shard,) = folder.record.read()
    held = read_tensors(folder.record.file(shard))
    none = torch.tensor([math.nan if row < 4 else float(row) for row in range(60)])
    folder.record.add(0, held | {"loss": none, "self_influence": none})
    asked = client(run)
    for path in ("overview", "examples?limit=200", "examples/0", "groups/label", "histogram?column=score"):
        answer = asked.get(f"/api/{path}")
        assert answer.status_code == 200, answer.text
        json.loads(answer.text, parse_constant=pytest.fail)
    row = asked.get("/api/examples/0").json()
    assert (row["loss"], row["self_influence"], row["rank"]) == (None, None, None)
    assert row["columns"] == {"score": None, "big": str(2**60)}
    assert sum(asked.get("/api/histogram?column=score").json()["counts"]) == 57
    rows = [row["row"] for row in asked.get("/api/examples?limit=200").json()["rows"]]
    assert rows == [*range(59, 3, -1), 0, 1, 2, 3]


HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a\u2028b\ud800",
    "=cmd|' /C calc'!A0",
)


def test_hostile_texts_and_ids_are_sent_as_json_and_nothing_else(tmp_path):
    ids = [f"{row}{HOSTILE[0]}" for row in range(60)]
    run = et.score(fit(), data(ids=ids), tmp_path / "run", columns={HOSTILE[1]: [HOSTILE[0]] * 60}).path
    asked = client(run, show=Custom(lambda row: HOSTILE[row % 4], "text", 60))
    for row in range(4):
        answer = asked.get(f"/api/examples/{row}")
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["content"]["text"] == HOSTILE[row]
        assert answer.json()["id"] == ids[row]
    answer = asked.get(f"/api/groups/{HOSTILE[1].replace('/', '%2F')}")
    assert answer.json()["groups"][0]["value"] == HOSTILE[0]
    found = asked.get("/api/examples", params={"group": f"{HOSTILE[1]}:{HOSTILE[0]}", "search": "</SCRIPT>"}).json()
    assert found["total"] == 60
    assert HOSTILE[0] not in asked.get("/").text


def png(width, height):
    """A PNG file that says it has so many pixels, and has none."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 10_000_000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def saved(form, size=(20, 30), mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, size, 1).save(file, form)
    return file.getvalue()


UPLOADS = {
    "100 MP": png(10_000, 10_000),
    "400 MP": png(20_000, 20_000),
    "cut off": saved("PNG")[:60],
    "text": b"this is no image",
    "nothing": b"",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    "GIF": saved("GIF", mode="L"),
    "TIFF": saved("TIFF"),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "5 MiB": b"x" * (5 * 2**20),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_bad_images_are_refused(digits, name):
    body = {"image": base64.b64encode(UPLOADS[name]).decode(), "label": 1}
    answer = client(digits, with_model=True).post("/api/ask", json=body, headers=HEADERS)
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]


@pytest.mark.parametrize("given", [5, "not base64!", "data:text/html,<b>", ["a"]])
def test_what_is_no_base64_is_refused(given):
    with refused(InputError, "image", "base64"):
        read_image(given)


def test_common_images_are_read():
    for form, mode in (("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("JPEG", "RGB"), ("WEBP", "RGB"), ("PNG", "P")):
        found = read_image("data:image/x;base64," + base64.b64encode(saved(form, (40, 30), mode)).decode())
        assert found.shape == ((30, 40) if mode == "L" else (30, 40, 3))
        assert found.dtype == np.uint8
    assert read_image(base64.b64encode(saved("PNG", (4000, 1000))).decode()).shape == (512, 2048, 3)


def test_a_failure_of_ours_says_nothing_and_keeps_the_headers(scored, caplog):
    class Broken(Texts):
        def search(self, words):
            raise RuntimeError("secret")

    answer = client(scored, show=Broken(["a"] * 60)).get("/api/examples?search=a")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert "content-security-policy" in answer.headers
    assert "secret" in caplog.text


def test_beyond_this_machine_everything_needs_the_token(scored):
    asked = client(scored, closed=True)
    for path in ADDRESSES:
        assert asked.get(path).status_code == 401, path
    assert asked.get("/api/overview?token=wrong").status_code == 401
    assert asked.get("/", headers={"cookie": "eigentrace_00000000=x"}).status_code == 401
    first = asked.get(f"/?token={TOKEN}")
    assert first.status_code == 200
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert asked.get("/api/overview").status_code == 200  # by the cookie
    assert asked.post("/api/undo").status_code == 403  # which is not enough to write


@pytest.mark.parametrize("token", [None, "short", "with spaces and / signs", "ünïcödeünïcödeünïcöde"])
def test_a_host_beyond_this_machine_demands_a_token(scored, token):
    with refused(InputError, "token"):
        run_server(scored, host="0.0.0.0", port=0, token=token)


def test_a_port_in_use_and_hosts_that_are_none(scored):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with refused(BusyError, f"127.0.0.1:{port}"):
            run_server(scored, port=port)
    with refused(InputError, "'no.such.host.invalid'"):
        run_server(scored, host="no.such.host.invalid", port=0, token=TOKEN)
    with refused(InputError, "port", 65535, 70000):
        run_server(scored, port=70000)


def test_hosts_of_an_address():
    assert hosts_of("127.0.0.1", 8000) == ("127.0.0.1:8000", "[::1]:8000", "localhost:8000")
    assert "[fd00::1]:8000" in hosts_of("fd00::1", 8000)
    assert "localhost" in hosts_of("127.0.0.1", 80)
    assert f"{socket.gethostname()}:8000" in hosts_of("0.0.0.0", 8000)
    assert f"{socket.gethostname()}:8000" not in hosts_of("127.0.0.1", 8000)
    allowed = hosts_of("127.0.0.1", 8000, ["data.example.org", "[fd00::2]", "other.example:8443"])
    assert {"data.example.org", "data.example.org:8000", "[fd00::2]:8000", "other.example:8443"} < set(allowed)
    assert "other.example:8000" not in allowed


@pytest.mark.parametrize("name", ["http://data.example.org", "data.example.org/page", "*", "a b", "name:port"])
def test_a_name_to_allow_that_is_no_host(scored, name):
    with refused(InputError, repr(name)):
        run_server(scored, port=0, allow_hosts=[name])


def test_a_server_on_all_addresses_is_opened_by_the_names_of_the_machine(scored):
    with started(scored, host="0.0.0.0", allow_hosts=["data.example.org"]) as server:
        port = server.place.port
        assert server.place.hostname == socket.gethostname().lower()
        for name in (socket.gethostname(), "127.0.0.1", "localhost", "data.example.org"):
            assert server.ask("GET", f"/api/examples/0?token={TOKEN}", Host=f"{name}:{port}")[0] == 200, name
        assert server.ask("GET", f"/api/examples/0?token={TOKEN}", Host="data.example.org")[0] == 200
        for host in (f"evil.example:{port}", f"10.1.2.3:{port}", f"{socket.gethostname()}:{port + 1}"):
            assert server.ask("GET", f"/api/examples/0?token={TOKEN}", Host=host)[0] == 400, host
        assert server.ask("GET", "/api/examples/0", Host=f"127.0.0.1:{port}")[0] == 401


HALF = {
    "nothing": b"",
    "a line": b"GET / HT",
    "headers": b"GET / HTTP/1.1\r\nHost: a\r\nX-A",
    "a second request": b"GET /static/app.js HTTP/1.1\r\nHost: {host}\r\n\r\nGET / HTTP/1.1\r\n",
    "a body": b"POST /api/ask HTTP/1.1\r\nHost: {host}\r\nX-Token: {token}\r\nContent-Length: 9\r\n\r\n{",
    "chunks": b"POST /api/ask HTTP/1.1\r\nHost: {host}\r\nX-Token: {token}\r\nTransfer-Encoding: chunked\r\n\r\n",
}


def test_half_a_request_is_not_waited_for(scored):
    with started(scored, request_seconds=0.5) as server:
        for name, half in HALF.items():
            with connected(server) as raw:
                raw.sendall(half.replace(b"{host}", server.place.netloc.encode()).replace(b"{token}", TOKEN.encode()))
                received = b"".join(iter(lambda: raw.recv(65536), b""))  # ends when the server closes the connection
            assert (b" 408 " in received) == (name in ("a body", "chunks")), name
        assert server.ask("GET", "/api/examples/0")[0] == 200


def test_bytes_of_half_a_head_do_not_extend_its_time(scored):
    with started(scored, request_seconds=1) as server, connected(server) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n")
        raw.settimeout(0.1)
        is_open, sent = True, 0
        while is_open and sent < 10_000:
            try:
                raw.sendall(b"X-A: b\r\n")
                sent += 1
                is_open = raw.recv(1000) != b""
            except TimeoutError:
                continue
            except OSError:
                is_open = False
        assert not is_open
        assert server.ask("GET", "/api/examples/0")[0] == 200


def test_a_client_that_leaves_is_no_failure_and_frees_what_it_sent(scored):
    with started(scored) as server:
        before = resident(server.process.pid)
        for _ in range(40):
            with connected(server) as raw:
                raw.sendall(almost_whole(server))
        assert server.ask("GET", "/api/examples/0")[0] == 200
        assert resident(server.process.pid) - before < 10 * MOST_BYTES
        server.process.terminate()
        server.process.wait(120)
        assert server.process.stderr.read() == ""


def test_bodies_together_are_bounded(scored, tmp_path):
    with started(shutil.copytree(scored, tmp_path / "run")) as server:
        with ExitStack() as stack:
            bodies = [stack.enter_context(connected(server)) for _ in range(MOST_HELD // MOST_BYTES + 1)]
            for body in bodies[:-1]:
                body.sendall(almost_whole(server))
            bodies[-1].sendall(almost_whole(server)[:1000])
            answered, _, _ = select.select(bodies, [], [], 120)  # only the one that is too much
            assert [body.recv(12) for body in answered] == [b"HTTP/1.1 503"]
        statuses = []
        while 200 not in statuses and len(statuses) < 10_000:  # until it has noticed that the clients are gone
            statuses.append(server.decide([1])[0])
        assert statuses[-1] == 200


def connected(server):
    return socket.create_connection((server.place.hostname, server.place.port), timeout=120)


def almost_whole(server):
    """Return a request that lacks its last byte."""
    head = f"POST /api/ask HTTP/1.1\r\nHost: {server.place.netloc}\r\nX-Token: {TOKEN}\r\n"
    return f"{head}Content-Length: {MOST_BYTES}\r\n\r\n".encode() + b"x" * (MOST_BYTES - 1)


def resident(process):
    """Return the resident memory of a process in bytes."""
    (line,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def test_a_real_server_refuses_foreign_hosts(scored):
    with started(scored) as server:
        assert server.ask("GET", "/api/examples/0")[0] == 200
        assert server.ask("GET", "/api/examples/0", Host="evil.example")[0] == 400
        assert server.ask("GET", "/api/examples/0", Host=f"127.0.0.1:{server.place.port + 1}")[0] == 400
        assert server.ask("POST", "/api/undo", {})[0] == 403
        for home in HOMES:
            for path in TRAVERSALS:  # sent as they are: a browser, or a test client, would tidy them up
                status, answer = server.ask("GET", f"/{home}/{path}")
                assert status in (400, 404), (home, path)
                assert "root:" not in answer["error"]
