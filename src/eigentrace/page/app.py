"""HTTP routes of the page: they validate requests and pass them to `Answers`."""

import html
import json
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal

from eigentrace.errors import BusyError, EigentraceError, InputError, StorageError, UnsupportedError
from eigentrace.page.access import Guard
from eigentrace.page.as_json import as_json
from eigentrace.page.index import SCORE, Wanted
from eigentrace.page.journal import WORDS
from eigentrace.page.replies import Answers, MissingRowError
from eigentrace.page.subject import Subject

if TYPE_CHECKING:
    from eigentrace.loading import Inputs
    from eigentrace.rendering import Show
    from eigentrace.runs.run import Run

try:
    from fastapi import FastAPI, HTTPException, Query, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse
    from starlette.background import BackgroundTask
    from starlette.concurrency import run_in_threadpool
except ModuleNotFoundError as error:
    raise InputError(
        f'The page needs the package {error.name}, which is not installed. In the clone: pip install -e ".[serve]"'
    ) from None

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
}
_PLAIN = "text/plain; charset=utf-8"
_MOST_SEARCHED = 500

Normalize = Literal["none", "gradient", "metric"]
Many = Annotated[int, Query(ge=1, le=100)]
Share = Annotated[float, Query(ge=0, le=1, allow_inf_nan=False)]
Bound = Annotated[float | None, Query(allow_inf_nan=False)]


def make_app(
    run: "str | Path | Run",
    *,
    token: str,
    hosts: Collection[str],
    show: "Show | None" = None,
    inputs: "Inputs | None" = None,
    with_model: bool = False,
    trust: bool = False,
    **access: Any,
) -> FastAPI:
    """Create the application that serves one run.

    Args:
        run: A run's directory, or an open run. With a directory, torch is imported only when a request needs it.
        token: The token that writing requires; it is included in the page.
        hosts: Accepted values of the Host header, with port.
        show: Renders the examples; default: chosen from the run's request.
        inputs: The model and the data, if they are already loaded.
        with_model: Load the model on first use, so that new examples can be explained.
        trust: Call the function that the run names to load its model and data; see `eigentrace.loading.trust`.
        access: Further settings of `eigentrace.page.access.Guard`, such as `closed` for servers that other machines
            can reach.
    """
    answers = Answers(Subject(run, show, inputs, with_model, trust))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> Any:
        yield
        answers.journal.close()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.answers = answers
    _add_failures(app)
    _add_files(app, token)
    _add_reading(app, answers)
    _add_single(app, answers)
    _add_asking(app, answers)
    _add_writing(app, answers)
    app.add_middleware(Guard, hosts=hosts, token=token, **access)
    return app


def _json(found: Any, status: int = 200) -> Response:
    # Non-ASCII characters are escaped, since lone surrogates cannot be encoded as UTF-8.
    return Response(json.dumps(found, allow_nan=False), status, media_type="application/json")


def _add_failures(app: FastAPI) -> None:
    """Register the error handlers, which return messages for invalid requests without revealing internals."""

    def refused(status: int) -> Callable[[Request, Exception], Response]:
        return lambda _, error: _json({"error": str(error.args[0]) if error.args else str(error)}, status)

    def invalid(_: Request, error: Exception) -> Response:
        found = error.errors() if isinstance(error, RequestValidationError) else []
        problems = "; ".join(f"{'.'.join(str(part) for part in item['loc'][1:])}: {item['msg']}" for item in found)
        return _json({"error": f"Invalid request: {problems}."}, 400)

    def http_error(_: Request, error: Exception) -> Response:
        status, message = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "")
        return _json({"error": str(message)}, status)

    app.exception_handler(RequestValidationError)(invalid)
    app.exception_handler(404)(lambda *_: _json({"error": "Not found: there is nothing at this address."}, 404))
    app.exception_handler(405)(
        lambda asked, _: _json({"error": f"Method {asked.method} is not allowed at this address."}, 405)
    )
    app.exception_handler(HTTPException)(http_error)
    app.exception_handler(MissingRowError)(refused(404))
    app.exception_handler(EigentraceError)(refused(400))
    app.exception_handler(UnsupportedError)(refused(409))
    app.exception_handler(BusyError)(refused(409))
    app.exception_handler(StorageError)(refused(500))


def _add_files(app: FastAPI, token: str) -> None:
    """Serve the page's static files from a fixed list, so that no requested path reaches the file system."""
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}
    meta = f'<meta name="token" content="{html.escape(token)}">'

    @app.get("/")
    def index() -> Response:
        page = files["index.html"].read_text(encoding="utf-8")
        page, found = re.subn(r'<meta name="token" content="[^"]*">', lambda _: meta, page, count=1)
        if not found:
            page = page.replace("<head>", f"<head>\n{meta}", 1)
        return Response(page, media_type=_TYPES[".html"])

    @app.get("/static/{name:path}")
    def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"There is no static file {name!r}.")
        return Response(files[name].read_bytes(), media_type=_TYPES.get(files[name].suffix, _PLAIN))


def _add_reading(app: FastAPI, answers: Answers) -> None:
    warming: list[Thread] = []

    @app.get("/api/overview")
    def overview() -> Response:
        found = answers.overview()
        if not warming:  # load what later requests need while the overview is displayed
            warming.append(Thread(target=answers.subject.warm_up, daemon=True))
            warming[0].start()
        return _json(found)

    @app.get("/api/histogram")
    def histogram(column: str = SCORE) -> Response:
        return _json(answers.histogram(column))

    @app.get("/api/groups/{column:path}")
    def groups(column: str) -> Response:
        return _json(answers.groups(column))

    @app.get("/api/examples")
    def examples(
        sort: str = SCORE,
        order: Literal["desc", "asc"] = "desc",
        label: int | None = None,
        prediction: int | None = None,
        disagree: bool = False,
        group: str | None = None,
        low: Share = 0.0,
        high: Share = 1.0,
        above: Bound = None,
        below: Bound = None,
        within: Annotated[list[str], Query(max_length=8)] = [],  # noqa: B006  # FastAPI copies it
        search: Annotated[str, Query(max_length=_MOST_SEARCHED)] = "",
        decision: Literal["drop", "keep", "relabel", "none"] | None = None,
        offset: Annotated[int, Query(ge=0, le=2**40)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 60,
    ) -> Response:
        code = None if decision is None else WORDS.index(decision)
        wanted = Wanted(
            sort, order == "desc", label, prediction, disagree, group, low, high, above, below, tuple(within),
            search, code,
        )  # fmt: skip
        return _json(answers.examples(wanted, offset, limit))


def _add_single(app: FastAPI, answers: Answers) -> None:
    @app.get("/api/examples/{row}")
    def example(row: int) -> Response:
        return _json(answers.example(row))

    @app.get("/api/image/{row}")
    def image(row: int) -> Response:
        return Response(answers.image(row), media_type="image/png")

    @app.get("/api/decisions")
    def decisions() -> Response:
        return _json(answers.decisions())

    @app.get("/api/export")
    def export(format: Literal["parquet", "csv", "rows"] = "parquet") -> Response:
        folder = tempfile.TemporaryDirectory(prefix="eigentrace-")
        path = answers.export(format, Path(folder.name))
        return FileResponse(path, filename=path.name, background=BackgroundTask(folder.cleanup))


def _add_asking(app: FastAPI, answers: Answers) -> None:
    @app.get("/api/explain/{row}")
    def explain(
        row: int,
        k: Many = 8,
        normalize: Normalize = "none",
        same_label: bool = False,
        exclude: Literal["self", "duplicates", "none"] = "self",
        exact: bool = False,
    ) -> Response:
        return _json(answers.explain(row, k, _optional(normalize), same_label, _optional(exclude), exact))

    @app.post("/api/ask")
    async def ask(request: Request) -> Response:
        asked = await _body(request)
        k, normalize = asked.get("k", 8), asked.get("normalize") or "none"
        if not isinstance(k, int) or not 1 <= k <= 100 or normalize not in ("none", "gradient", "metric"):
            raise HTTPException(
                400,
                "k must be an integer from 1 to 100 and normalize one of none, gradient or metric, "
                f"got k={str(k)[:50]!r} and normalize={str(normalize)[:50]!r}.",
            )
        exact = asked.get("exact", False)
        if not isinstance(exact, bool):
            raise HTTPException(400, f"exact must be true or false, got {type(exact).__name__}.")
        return _json(await run_in_threadpool(answers.ask, asked, k, _optional(normalize), exact))


def _add_writing(app: FastAPI, answers: Answers) -> None:
    @app.post("/api/decisions")
    async def decide(request: Request) -> Response:
        return _json(as_json(await run_in_threadpool(answers.decide, await _body(request))))

    @app.post("/api/undo")
    async def undo(_: Request) -> Response:
        return _json(as_json(await run_in_threadpool(answers.undo)))


def _optional(choice: str) -> str | None:
    return None if choice == "none" else choice


async def _body(request: Request) -> Mapping[str, Any]:
    """Parse the request body as a JSON object."""
    try:
        found = json.loads(await request.body(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The request body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise HTTPException(400, f"The request body must be a JSON object, got {type(found).__name__}.")
    return found


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")
