"""The commands `serve`, which starts a server without loading torch, and `report`, which writes the page as a file."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from eigentrace.errors import InputError
from eigentrace.store.folder import Folder

if TYPE_CHECKING:
    from eigentrace.page.server import Place

_NO_SERVER = (
    "The page needs the packages fastapi and uvicorn, which are not installed. Install them in the clone: "
    'pip install -e ".[serve]"'
)


def serve(
    path: Path,
    port: int,
    host: str,
    token: str | None,
    allow_hosts: list[str],
    model: bool,
    trust: bool,
    open_browser: bool,
    as_json: bool,
) -> None:
    """Serve the page of a run until Ctrl-C."""
    _check_scored(path)

    def tell(place: "Place") -> None:
        if as_json:
            print(json.dumps({"run": str(path), "url": place.url, "open_to_others": place.is_open}), flush=True)
        else:
            print(f"Serving {path} at {place.url} (Ctrl-C to stop; decisions are saved as you make them)", flush=True)

    try:
        from eigentrace.page.server import run_server as start
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "starlette"):
            raise
        raise InputError(_NO_SERVER) from None
    try:
        start(
            path,
            port=port,
            host=host,
            token=token,
            allow_hosts=allow_hosts,
            with_model=model,
            trust=trust,
            open_browser=open_browser,
            on_start=tell,
        )
    except KeyboardInterrupt:
        print(file=sys.stderr)


def report(path: Path, out: Path | None, rows: int, trust: bool, as_json: bool) -> None:
    """Write the page of a run as one HTML file."""
    from eigentrace.page.one_file import write_report

    _check_scored(path)
    written = write_report(path, Folder(path).page_file if out is None else out, rows=rows, trust=trust)
    size = written.stat().st_size
    if as_json:
        print(json.dumps({"run": str(path), "out": str(written), "bytes": size}), flush=True)
    else:
        print(f"{written} ({size / 1e6:.1f} MB). Open it in a browser: {written.resolve().as_uri()}", flush=True)


def _check_scored(path: Path) -> None:
    """Raise InputError, naming the command to run first, unless the run has scores. Loads torch only to raise."""
    if not Folder(path).exists:
        from eigentrace.cli import request

        request.scored_folder(path)
