"""The commands as people write them: names, options, help. Loading this must not load torch."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, show_default=False, **more)


def _of_model(text: str, *names: str) -> Any:
    return _option(text, *names, rich_help_panel="A Hugging Face model and a dataset")


def _of_fit(text: str, *names: str) -> Any:
    return _option(text, *names, rich_help_panel="The fit")


def _hide_bars() -> None:
    """Leave out other libraries' bars for what takes a moment: they would stand between the answers."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _commands() -> Any:
    _hide_bars()
    # Imported here: torch takes seconds to load, and `--help` must not wait for it.
    from eigentrace.cli import commands

    return commands


@contextmanager
def _resumable() -> Iterator[None]:
    """Say how to go on after Ctrl-C; what was done is on the disk."""
    try:
        yield
    except KeyboardInterrupt:
        again = shlex.join(["eigentrace", *sys.argv[1:]])
        print(f"\nStopped. What was done is kept; go on with: {again}", file=sys.stderr, flush=True)
        sys.exit(130)


_Run = Annotated[Path, typer.Argument(help="Directory of a run.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_Trust = Annotated[
    bool, typer.Option("--trust", help="Call the function that the run names to load its model and data; remembered.")
]


def fit(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Directory of the run; new, or one that was interrupted.")],
    config: Annotated[Path | None, _option("Settings in TOML; options override them.")] = None,
    function: Annotated[
        str | None, _option("Function that returns (task, data): file.py:function, or a.module:function.", "--input")
    ] = None,
    model: Annotated[Path | None, _of_model("Folder written by save_pretrained.")] = None,
    dataset: Annotated[str | None, _of_model("CSV, TSV, JSONL, Parquet, or a folder of `datasets`.", "--data")] = None,
    task: Annotated[str | None, _of_model("text-classification, image-classification, seq2seq, causal-lm.")] = None,
    text: Annotated[str | None, _of_model("Column of texts.")] = None,
    text_pair: Annotated[str | None, _of_model("Column of second texts.")] = None,
    target: Annotated[str | None, _of_model("Column of texts to be written.")] = None,
    label: Annotated[str | None, _of_model("Column of classes.")] = None,
    image: Annotated[str | None, _of_model("Column of images.")] = None,
    id: Annotated[str | None, _of_model("Column that names examples.", "--id")] = None,
    split: Annotated[str | None, _of_model("Part of a dataset folder.")] = None,
    tokenizer: Annotated[Path | None, _of_model("Folder of the tokenizer, if not the model's.")] = None,
    max_length: Annotated[int | None, _of_model("Tokens kept of a text.")] = None,
    batch_size: Annotated[int | None, _of_model("Examples the model sees at once.")] = None,
    workers: Annotated[int | None, _of_model("Processes that prepare examples.")] = None,
    device: Annotated[str | None, _of_model("Where the model computes: cpu, cuda, cuda:1.")] = None,
    params: Annotated[
        str | None, _of_fit("Parameters that count: all, 'last layer', 'top 20%', a pattern of names.")
    ] = None,
    l2: Annotated[float | None, _of_fit("Weight of the penalty the model was trained with.")] = None,
    method: Annotated[str | None, _of_fit("Arnoldi if not given; TracIn, RandProj, Lissa, Loss, …")] = None,
    steps: Annotated[int | None, _of_fit("Curvature products (200).")] = None,
    keep: Annotated[int | None, _of_fit("Directions kept (50).")] = None,
    tail: Annotated[str | None, _of_fit("What stands for the others: auto, shaped, none, or a number.")] = None,
    coordinates: Annotated[str | None, _of_fit("Numbers stored per example for the tail: 1024, or a share.")] = None,
    curvature: Annotated[str | None, _of_fit("auto, gauss-newton or hessian.")] = None,
    sample: Annotated[str | None, _of_fit("Examples the curvature is taken on (8192), or all.")] = None,
    precision: Annotated[str | None, _of_fit("fp32 or bf16.")] = None,
    seed: Annotated[int | None, _of_fit("Decides on everything random.")] = None,
    set_: Annotated[
        list[str] | None,
        _of_fit("Any other setting of the method: depth=50; a name given again is a list.", "--set"),
    ] = None,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Fit an attribution method to a trained model: unless another is named, diagonalise its curvature.

    Give a Hugging Face folder with a dataset (--model, --data, --task), or a function of your own (--input).

    Killed or interrupted, the same command goes on, and so does `eigentrace fit RUN` alone.
    """
    with _resumable():
        _commands().fit(**_grouped(context.params))


_OF_FIT = (
    "params", "l2", "method", "steps", "keep", "tail", "coordinates", "curvature", "sample", "precision", "seed",
)  # fmt: skip


def _grouped(given: dict[str, Any]) -> dict[str, Any]:
    """Sort the options of a fit into the sections that a file of settings has."""
    plain = {"path": given.pop("run"), "config": given.pop("config"), "as_json": given.pop("json")}
    plain["trust"] = given.pop("trust")
    others = given.pop("set_") or []
    fit = {name: given.pop(name) for name in _OF_FIT}
    for name, value in map(_setting, others):
        if fit.get(name) is not None and name in _OF_FIT:
            raise typer.BadParameter(f"--set {name}={value} and --{name} both give {name}: leave one of them out.")
        held = fit.get(name)
        fit[name] = value if held is None else [*(held if isinstance(held, list) else [held]), value]
    return plain | {"given": {"input": given, "fit": fit}}


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--set takes name=value, such as depth=50, got {text!r}.")
    return name.strip().replace("-", "_"), value.strip()


def score(
    run: Annotated[Path, typer.Argument(help="Directory that `eigentrace fit` made.")],
    batch: Annotated[int | None, _option("Examples per pass; as many as fit a GPU if not given.")] = None,
    precision: Annotated[str | None, _option("fp32 or bf16.")] = None,
    features: Annotated[str | None, _option("Type of stored features: fp32 or fp16.")] = None,
    shard_rows: Annotated[int | None, _option("A shard ends after so many rows (250000),")] = None,
    shard_seconds: Annotated[float | None, _option("or after so many seconds (60).")] = None,
    device: Annotated[str | None, _option("Where the model computes, if elsewhere than for the fit.")] = None,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Score every training example into the run: self-influence, loss, and features to search.

    Killed or interrupted, the same command goes on.
    """
    given = {"batch": batch, "precision": precision}
    limits = {"features": features, "shard_rows": shard_rows, "shard_seconds": shard_seconds}
    with _resumable():
        _commands().score(run, given | limits, device, trust, json)


def explain(
    run: _Run,
    row: Annotated[list[int] | None, typer.Option(help="A row of the run to explain; may be given again.")] = None,
    queries: Annotated[
        Path | None, typer.Option(help="New examples, in a file with the columns of the dataset (needs the model).")
    ] = None,
    k: Annotated[int, typer.Option("-k", "--top", min=1, help="How many on either side.")] = 10,
    normalize: Annotated[str | None, typer.Option(help="gradient or metric.")] = None,
    same_label: Annotated[bool, typer.Option("--same-label", help="Only examples with the query's label.")] = False,
    top_labels: Annotated[
        int | None, typer.Option(help="Only the query's so many most probable labels (needs the model).")
    ] = None,
    exclude: Annotated[str, typer.Option(help="self, duplicates or none.")] = "self",
    exact: Annotated[bool, typer.Option("--exact", help="Load the model and score candidates exactly.")] = False,
    shortlist: Annotated[
        int | None, typer.Option(min=2, help="Candidates that --exact scores; 2,000, or all of a smaller run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the answers to this Parquet or CSV file.")] = None,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Show the training examples that speak for and against an example.

    By row, answers come from the stored features and need no model; --exact and --queries load it.
    """
    options = {"k": k, "normalize": normalize, "same_label": same_label, "top_labels": top_labels}
    options |= {"exclude": None if exclude == "none" else exclude, "shortlist": shortlist}
    _commands().explain(run, row or [], queries, options, exact, out, trust, json)


def clean(
    run: _Run,
    drop: Annotated[str | None, typer.Option(help="Drop the highest: 5%, or a number of rows.")] = None,
    keep: Annotated[str | None, typer.Option(help="Keep only the lowest: 90%, or a number of rows.")] = None,
    above: Annotated[float | None, typer.Option(help="Drop scores above this number.")] = None,
    below: Annotated[float | None, typer.Option(help="Drop scores below this number.")] = None,
    by: Annotated[str, typer.Option(help="Column to decide by.")] = "self_influence",
    per_class: Annotated[bool, typer.Option("--per-class", help="Take the share within each label.")] = False,
    chosen: Annotated[
        Path | None,
        typer.Option("--from", help="Go by the decisions in this file, which --decisions or the page wrote."),
    ] = None,
    decisions: Annotated[Path | None, typer.Option(help="Parquet or CSV file for every row's decision.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the dataset without the dropped rows.")] = None,
    json: _Json = False,
) -> None:
    """Decide which rows to drop, and write the dataset without them in the format it came in."""
    amounts = {"drop": drop, "keep": keep, "above": above, "below": below}
    _commands().clean(run, amounts, by, per_class, chosen, decisions, out, json)


def check(
    run: _Run,
    repair: Annotated[
        bool, typer.Option("--repair", help="Set damaged shards aside, and score their rows again.")
    ] = False,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Look at every file of a run; exit with 1 if something is wrong or missing."""
    with _resumable():
        _commands().check(run, repair, trust, json)


def info(run: _Run, json: _Json = False) -> None:
    """Say what a run is, how far it is, and what stands out in it."""
    _commands().info(run, json)


def serve(
    run: _Run,
    port: Annotated[int, typer.Option(help="Where to listen; 0 for any port that is free.")] = 8765,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine with --token.")] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(help="What others need to know to read and decide.")] = None,
    model: Annotated[bool, typer.Option("--model", help="Load the model too, to ask about new examples.")] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Open a page on a run: look at examples, ask who taught what, decide what goes."""
    from eigentrace.cli.paging import serve as start

    _hide_bars()
    start(run, port, host, token, model, trust, open_, json)


def report(
    run: _Run,
    out: Annotated[Path | None, typer.Option(help="A new HTML file; RUN/page.html if not given.")] = None,
    rows: Annotated[
        int,
        typer.Option(
            min=1,
            help="Examples of highest self-influence to explain; those that explain them, and a sample, are added.",
        ),
    ] = 300,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Write the page on a run as one HTML file, to mail around."""
    from eigentrace.cli.paging import report as write

    write(run, out, rows, trust, json)
