"""A server on a run: inside the test process, or in a separate process that can be killed."""

import http.client
import json
import subprocess
import sys
from contextlib import contextmanager
from urllib.parse import urlsplit

from fastapi.testclient import TestClient

from eigentrace.page.app import make_app

TOKEN = "a-token-for-tests-only"
HEADERS = {"X-Token": TOKEN}
STARTING = (
    "import json, sys; from eigentrace.page.server import run_server; "
    "run_server(sys.argv[1], port=0, token=sys.argv[2], **json.loads(sys.argv[3]), "
    "on_start=lambda place: print(place.url, flush=True))"
)


def client(run, **options):
    """Return a test client of the application, which needs no network."""
    return TestClient(make_app(run, token=TOKEN, hosts=["testserver"], **options))


class Started:
    """A server in a separate process, with requests over TCP."""

    def __init__(self, process, url):
        self.process, self.place = process, urlsplit(url)

    def ask(self, method, path, body=None, **headers):
        """Send a request; return the status and the parsed JSON."""
        connection = http.client.HTTPConnection(self.place.hostname, self.place.port, timeout=300)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, None if body is None else json.dumps(body), given)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def decide(self, rows, decision="drop"):
        return self.ask("POST", "/api/decisions", {"rows": rows, "decision": decision}, **HEADERS)

    def counts(self):
        return self.ask("GET", "/api/decisions")[1]["counts"]


@contextmanager
def started(run, **settings):
    """Start `eigentrace.page.server.run_server` in a separate process, which is killed on exit."""
    command = [sys.executable, "-c", STARTING, str(run), TOKEN, json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            assert url, process.stderr.read()
            yield Started(process, url)
        finally:
            process.kill()
