"""The page of `bench.peers`: one table per problem, from its JSON."""

from collections.abc import Iterator
from pathlib import Path

from bench.peers.method import METHODS
from bench.peers.problems import PROBLEMS
from harness.measure import Cell
from harness.places import data_file, save_page
from harness.record import Notes, Record, heading, judged, millions, read, runs_of, shown, stem, table

FIT_GOAL, SCORE_GOAL = 1.0, 5.0
"""Goals for the ratios of a peer's fit and scoring times to ours on the digits."""
OURS, SAME = "arnoldi", "arnoldi-hessian"
"""The recommended method, and that which computes the same numbers as peers with an iteration."""
ITERATED = ("captum-arnoldi", "pydvl-arnoldi", "pydvl-woodbury", "dattri-arnoldi")
UNFITTED = ("captum-tracin", "captum-tracin-fast")
"""Peers without a fit."""
QUIET = 1.5
"""Largest load of the machine at which seconds are reliable."""
_TIMED = "digits"


def render(out: Path, small: bool) -> None:
    """Render the tables from the JSON file."""
    name = stem("peers", small=small)
    command = "python -m bench.peers" + (" --small" if small else "")
    lines = heading("Side by side with the peers" + (", small" if small else ""), command, name)
    lines += ["", "Settings, and why these: [peers.md](../peers.md). Seconds are the processor's, on one thread;"]
    lines += ["LDS, AUC and AP in percent, of the best of the settings tried. Not comparable between machines."]
    for machine, problems in read(data_file(out, name)).items():
        lines += ["", f"## {machine}"]
        for problem in sorted(problems, key=_place):
            lines += ["", *_problem(problem, problems[problem], small)]
        lines += ["", *runs_of(problems)]
    save_page(out, name, lines)


def _place(problem: str) -> int:
    return list(PROBLEMS).index(problem)


def _problem(name: str, record: Record, small: bool) -> list[str]:
    facts, notes = record["facts"], Notes()
    asks_pairs = facts["num_queries"] > 0
    data = f"{facts['num_train']:,} examples"
    data += f", {facts['num_queries']:,} queries" if asks_pairs else f", {facts['num_wrong']:,} of them wrong"
    says = f"{facts['train_accuracy']:.1f}% of the training and {facts['test_accuracy']:.1f}% of the test labels"
    lines = [f"### {record['title']}", ""]
    lines += [f"{data}; {millions(record['parameters'])} parameters; the network agrees with {says}.", ""]
    quality = ["LDS", "95%", "LDS, averaged"] if asks_pairs else ["AUC", "AP"]
    headings = ["method", "version", "fit, s", "score, s", "peak, MiB", *quality, "setting"]
    lines += table(headings, _rows(record["cells"], asks_pairs, notes))
    if name == _TIMED and not small:
        lines += ["", *_goals(record["cells"])]
    lines += _load(record["cells"])
    return lines + (["", *notes.lines()] if notes.texts else [])


def _rows(cells: dict[str, Cell], asks_pairs: bool, notes: Notes) -> Iterator[list[str]]:
    for name, entry in METHODS.items():
        cell = cells.get(name)
        if not (entry.has_cross if asks_pairs else entry.has_self):
            continue
        if cell is not None and "missing" in cell:
            yield [entry.title, cell["missing"], *["–"] * (7 if asks_pairs else 6)]
            continue
        version = "–" if cell is None else cell.get("version", entry.package or "–")
        row = [entry.title, version, shown(cell, "fit", ",.2f", notes), shown(cell, "score", ",.2f", notes)]
        row.append(shown(_in_mib(cell), "peak", ",.0f", notes))
        if asks_pairs:
            row += [shown(cell, "lds", ".1f", notes), _interval(cell), _averaged(cell)]
        else:
            row += [shown(cell, key, ".2f", notes) for key in ("auc", "ap")]
        yield [*row, (cell or {}).get("setting") or "–"]


def _in_mib(cell: Cell | None) -> Cell | None:
    return cell if cell is None or "peak" not in cell else cell | {"peak": cell["peak"] / 2**20}


def _interval(cell: Cell | None) -> str:
    return "–" if not cell or "lds_low" not in cell else f"{cell['lds_low']:.1f} to {cell['lds_high']:.1f}"


def _averaged(cell: Cell | None) -> str:
    found = (cell or {}).get("ensemble", {})
    return "–" if "lds" not in found else f"{found['lds']:.1f} ({found['models']})"


def _goals(cells: dict[str, Cell]) -> list[str]:
    """Compare our times with the fastest peer's, first among those that do the same work, then among all."""
    lines = []
    timed = {name: cell for name, cell in cells.items() if METHODS[name].package and "score" in cell}
    for ours, names, whose in (
        (OURS, ITERATED, "that iterates the curvature"),
        (SAME, ITERATED, "that iterates the curvature"),
        (OURS, tuple(name for name in timed if name != "cleanlab"), "of any kind"),
    ):
        peers = {name: cell for name, cell in timed.items() if name in names}
        for key, goal in (("fit", FIT_GOAL), ("score", SCORE_GOAL)):
            own = cells.get(ours, {}).get(key)
            asked = {name: cell[key] for name, cell in peers.items() if key == "score" or name not in UNFITTED}
            if own and asked:
                least = min(asked, key=lambda name: asked[name])
                ratio = asked[least] / own
                text = judged(f"{ratio:.2g} times as long", ratio, goal, at_least=True)
                title = METHODS[ours].title
                lines.append(
                    f"- {key.capitalize()}, {title}: the fastest peer {whose}, {METHODS[least].title}, takes {text}."
                )
    return lines


def _load(cells: dict[str, Cell]) -> list[str]:
    """Return a note if the machine was busy with other work, which distorts seconds."""
    loads = [cell["load"] for cell in cells.values() if "load" in cell]
    if not loads or max(loads) <= QUIET:
        return []
    return [
        "",
        f"The machine was busy with other work meanwhile: load {min(loads):.1f} to {max(loads):.1f}, ours included.",
    ]
