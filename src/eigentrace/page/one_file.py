"""The page as one HTML file: the overview and the examples of highest self-influence, explained."""

import base64
import hashlib
import io
import json
import re
import warnings
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eigentrace.disk.atomic import appearing
from eigentrace.errors import EigentraceWarning, UnsupportedError
from eigentrace.page.as_json import as_json
from eigentrace.page.index import SCORE
from eigentrace.page.replies import Answers
from eigentrace.page.subject import Subject
from eigentrace.settings import check_counts

if TYPE_CHECKING:
    from eigentrace.rendering import Show
    from eigentrace.runs.run import Run

_STATIC = Path(__file__).parent / "static"
_STYLES = ("style.css", "views.css")
_LIBRARIES = ("vendor/d3.min.js", "vendor/plot.min.js")
_ENTRY = "app.js"
_SIDE = 6
"""Number of proponents and of opponents of each explained row."""
_MOST_BYTES = 4_000_000
"""Limit for the embedded rows, so that the file can be sent by mail; rows of lower self-influence are left out."""
_LARGE_IMAGE = 8_000
_THUMBNAIL = 192
_DIGITS = 6

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)

Record = dict[str, Any]


def write_report(
    run: "str | Path | Run", out: str | Path, show: "Show | None" = None, rows: int = 300, *, trust: bool = False
) -> Path:
    """Write the page on a run as a new, self-contained HTML file that needs no server and no network.

    It contains the overview, the examples of highest self-influence with their strongest proponents and opponents, and
    a sample of the others. Examples that would make the file larger than about 5 MB are left out. Raises MismatchError
    if the data has changed since the run scored it.

    Args:
        run: A run's directory, or an open run.
        out: The file to write; it must not exist.
        show: Renders the examples; default: chosen from the run's request.
        rows: The number of examples of highest self-influence to include and explain.
        trust: Call the function that the run names to load its model and data; see `eigentrace.loading.trust`.
    """
    check_counts(1, rows=rows)
    out, subject = Path(out), Subject(run, show, trust=trust)
    with appearing(out) as partial:
        if subject.show is None and subject.changed is not None:
            raise subject.changed
        if subject.trouble:
            warnings.warn(subject.trouble, EigentraceWarning, stacklevel=2)
        page = _page(_embedded(Answers(subject), rows))
        partial.write_text(page, encoding="utf-8", newline="\n")
    return out


def _embedded(answers: Answers, count: int) -> Record:
    """Return the data to embed in the page, in the form that `static/embedded.js` reads."""
    overview = answers.overview() | {"live": False}
    numbers = [column["name"] for column in overview["columns"] if column["kind"] == "number"]
    highest = answers.index.order(SCORE, True)[:count].tolist()
    found = {
        "overview": overview,
        "histograms": {name: answers.histogram(name) for name in numbers},
        "groups": {name: answers.groups(name)["groups"] for name in overview["group_columns"]},
        "rows": {},
        "explain": {},
    }
    kept, explained = _Kept(answers), _explained(answers, highest)
    for row in highest:
        sides = explained.get(row)
        mentioned = [other for side in ("proponents", "opponents") for other, _ in sides[side]] if sides else []
        if not kept.add([row, *mentioned]):
            break
        if sides:
            found["explain"][row] = sides
    sample = np.random.default_rng(0).permutation(answers.columns.num_rows)[: 2 * count].tolist()
    for row in sample:
        if not kept.add([row]):
            break
    return found | {"rows": kept.rows}


class _Kept:
    """The embedded rows, up to the size limit."""

    def __init__(self, answers: Answers) -> None:
        self.answers, self.rows, self.size = answers, dict[int, Record](), 0

    def add(self, rows: Iterable[int]) -> bool:
        """Add rows with their contents, or none of them if they exceed the size limit; return whether they fit."""
        new = [row for row in dict.fromkeys(rows) if row not in self.rows]
        records = [_with_image(self.answers, record) for record in self.answers.rows(new)]
        for record in records:
            record["rank"], record["quantile"] = self.answers.index.place(record["row"])
        size = sum(len(_json(record)) for record in records)
        if self.rows and self.size + size > _MOST_BYTES:
            return False
        self.size += size
        self.rows |= dict(zip(new, records, strict=True))
        return True


def _explained(answers: Answers, rows: Sequence[int]) -> dict[int, Record]:
    """Explain all rows in one pass; empty if the run is incomplete or its scores need the model."""
    if answers.columns.num_missing:
        return {}
    try:
        found = answers.subject.run.explain(np.array(rows), _SIDE)
    except UnsupportedError:
        return {}
    result: dict[int, Record] = {row: {"how": found.how, "unit": found.unit} for row in rows}
    for name, side in (("proponents", found.proponents), ("opponents", found.opponents)):
        for row, others, scores in zip(rows, side.rows.tolist(), side.scores.tolist(), strict=True):
            result[row][name] = [[at, as_json(score)] for at, score in zip(others, scores, strict=True) if at >= 0]
    return result


def _with_image(answers: Answers, record: Record) -> Record:
    if record["content"]["kind"] != "image":
        return record
    png, kind = answers.image(record["row"]), "png"
    if len(png) > _LARGE_IMAGE:
        png, kind = _smaller(png)
    return record | {"content": {"kind": "image", "src": f"data:image/{kind};base64,{base64.b64encode(png).decode()}"}}


def _smaller(png: bytes) -> tuple[bytes, str]:
    """Reduce an image to a JPEG thumbnail; without Pillow it is returned unchanged."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return png, "png"
    with Image.open(io.BytesIO(png), formats=("PNG",)) as opened:
        opened.thumbnail((_THUMBNAIL, _THUMBNAIL))
        stored = io.BytesIO()
        opened.convert("RGB").save(stored, format="JPEG", quality=82)
    return stored.getvalue(), "jpeg"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script element: <, > and & are escaped."""
    text = json.dumps(_rounded(value), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _page(found: Record) -> str:
    """Embed styles, scripts and data in the page, with a Content Security Policy that allows nothing else."""
    page = (_STATIC / "index.html").read_text(encoding="utf-8")
    styles = "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in _STYLES)
    scripts = [(_STATIC / name).read_text(encoding="utf-8") for name in _LIBRARIES] + [bundled()]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(styles)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    page = re.sub(r'<(?:link rel="stylesheet"|meta name="token")[^>]*>\n', "", page)
    page = re.sub(r"<script [^>]*></script>\n", "", page)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{styles}</style>\n'
    page = page.replace('<meta name="viewport"', head + '<meta name="viewport"', 1)
    data = f'<script type="application/json" id="embedded">{_json(found)}</script>\n'
    body = data + "".join(f"<script>{script}</script>\n" for script in scripts)
    return page.replace("</body>", f"{body}</body>", 1)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def bundled() -> str:
    """Bundle the page's modules into one script: one function per module, called in order of their dependencies.

    Browsers do not load modules from file: URLs. The modules must use named imports only, at the top of the file.
    """
    texts: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    waiting = [Path(_ENTRY).stem]
    while waiting:
        name = waiting.pop()
        texts[name] = (_STATIC / f"{name}.js").read_text(encoding="utf-8")
        needs[name] = [module for _, module in _IMPORT.findall(texts[name])]
        waiting += [module for module in needs[name] if module not in texts]
    parts = ['"use strict";']
    for name in TopologicalSorter(needs).static_order():
        made = [exported for _, exported in _EXPORT.findall(texts[name])]
        code = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = module_{found[2]};\n", texts[name])
        code = _EXPORT.sub(r"\1 \2", code)
        parts.append(f"const module_{name} = (() => {{\n{code}return {{ {', '.join(made)} }};\n}})();")
    return "\n".join(parts)
