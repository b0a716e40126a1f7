"""The commands' names, options and help texts. Importing this module must not import torch."""

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
    """Turn off the progress bars of Hugging Face libraries, which would clutter the output."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _commands() -> Any:
    _hide_bars()
    # Imported here: torch takes seconds to load, and `--help` must not wait for it.
    from eigentrace.cli import commands

    return commands


@contextmanager
def _resumable() -> Iterator[None]:
    """Print the command that resumes after Ctrl-C; completed work is on disk."""
    try:
        yield
    except KeyboardInterrupt:
        again = shlex.join(["eigentrace", *sys.argv[1:]])
        print(f"\nInterrupted. Completed work is saved; resume with: {again}", file=sys.stderr, flush=True)
        sys.exit(130)


_Run = Annotated[Path, typer.Argument(help="Directory of a run.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_Texts = Annotated[
    bool | None,
    typer.Option("--texts/--no-texts", help="Show the texts of examples (default: of datasets up to 500 MB)."),
]
_Trust = Annotated[
    bool, typer.Option("--trust", help="Allow calling the function that loads this run's model and data; remembered.")
]

_Settings = Annotated[
    list[str] | None,
    _of_fit(
        "Any other setting of the method, as name=value: depth=50, basis.memory=8GB; repeat a name for a list.", "--set"
    ),
]
_Estimate = Annotated[
    bool, typer.Option("--estimate", help="Only print what the fit will take: time, memory, disk space.")
]


def fit(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Directory of the run: a new one, or one whose fit was interrupted.")],
    config: Annotated[Path | None, _option("Settings file (TOML); options override its values.")] = None,
    function: Annotated[
        str | None, _option("Function that returns (task, data): file.py:function, or a.module:function.", "--input")
    ] = None,
    model: Annotated[Path | None, _of_model("Model folder, written by save_pretrained.")] = None,
    dataset: Annotated[
        str | None,
        _of_model("Dataset: a CSV, TSV, JSONL or Parquet file, or a folder written by `datasets`.", "--data"),
    ] = None,
    task: Annotated[
        str | None, _of_model("Kind of task: text-classification, image-classification, seq2seq, causal-lm.")
    ] = None,
    text: Annotated[str | None, _of_model("Column with the texts.")] = None,
    text_pair: Annotated[str | None, _of_model("Column with the second texts of text pairs.")] = None,
    target: Annotated[str | None, _of_model("Column with the target texts, for seq2seq.")] = None,
    label: Annotated[str | None, _of_model("Column with the labels.")] = None,
    image: Annotated[str | None, _of_model("Column with the images.")] = None,
    id: Annotated[str | None, _of_model("Column with the examples' ids.", "--id")] = None,
    split: Annotated[str | None, _of_model("Split of a dataset folder to use.")] = None,
    tokenizer: Annotated[Path | None, _of_model("Folder of the tokenizer, if not the model's.")] = None,
    max_length: Annotated[int | None, _of_model("Maximum number of tokens per text; the rest is cut off.")] = None,
    batch_size: Annotated[int | None, _of_model("Number of examples per batch.")] = None,
    workers: Annotated[int | None, _of_model("Number of processes that load examples.")] = None,
    device: Annotated[str | None, _of_model("Device of the model: cpu, cuda, cuda:1.")] = None,
    params: Annotated[
        str | None, _of_fit("Parameters to use: all, 'last layer', 'top 20%', or a pattern of names.")
    ] = None,
    l2: Annotated[float | None, _of_fit("λ of the ℓ2 penalty (λ/2)·‖θ‖² in training: the weight_decay of SGD.")] = None,
    method: Annotated[str | None, _of_fit("Attribution method: Arnoldi (default), TracIn, RandProj, Lissa, …")] = None,
    steps: Annotated[int | None, _of_fit("Number of curvature products (200).")] = None,
    keep: Annotated[int | None, _of_fit("Number of directions to keep (50).")] = None,
    tail: Annotated[str | None, _of_fit("Tail, for directions not kept: auto, shaped, ekfac, none, a number.")] = None,
    coordinates: Annotated[
        str | None, _of_fit("Numbers stored per example for the tail: 1024, or a share of its energy such as 0.9.")
    ] = None,
    curvature: Annotated[str | None, _of_fit("Curvature matrix: auto, gauss-newton or hessian.")] = None,
    sample: Annotated[str | None, _of_fit("Number of examples for the curvature (8192), or all.")] = None,
    precision: Annotated[str | None, _of_fit("Precision of the curvature products: fp32 or bf16.")] = None,
    seed: Annotated[int | None, _of_fit("Seed of all random choices.")] = None,
    set_: _Settings = None,
    estimate: _Estimate = False,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Fit an attribution method to a trained model: by default, find the top eigenpairs of its curvature.

    Pass a Hugging Face model folder and a dataset (--model, --data, --task), or your own function (--input).

    After an interruption, the same command resumes the fit, and so does `eigentrace fit RUN` without options.
    """
    given = _grouped(context.params)
    if estimate:
        _commands().estimate(**given)
        return
    with _resumable():
        _commands().fit(**given)


_OF_FIT = (
    "params", "l2", "method", "steps", "keep", "tail", "coordinates", "curvature", "sample", "precision", "seed",
)  # fmt: skip


def _grouped(given: dict[str, Any]) -> dict[str, Any]:
    """Group the options of `fit` into the sections of a settings file."""
    plain = {"path": given.pop("run"), "config": given.pop("config"), "as_json": given.pop("json")}
    plain["trust"] = given.pop("trust")
    given.pop("estimate")
    others = given.pop("set_") or []
    fit = {name: given.pop(name) for name in _OF_FIT}
    for name, value in map(_setting, others):
        if fit.get(name) is not None and name in _OF_FIT:
            raise typer.BadParameter(f"{name} is set by both --set {name}={value} and --{name}: leave one of them out.")
        held = fit.get(name)
        fit[name] = value if held is None else [*(held if isinstance(held, list) else [held]), value]
    return plain | {"given": {"input": given, "fit": fit}}


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"--set needs name=value, such as depth=50, got {text!r}.")
    return name.strip().replace("-", "_"), value.strip()


def score(
    run: Annotated[Path, typer.Argument(help="Directory of a run created by `eigentrace fit`.")],
    batch: Annotated[int | None, _option("Number of examples per pass; by default, as many as fit a GPU.")] = None,
    precision: Annotated[str | None, _option("Precision of gradients and their projections: fp32 or bf16.")] = None,
    features: Annotated[str | None, _option("Dtype of the stored features: fp32 or fp16.")] = None,
    shard_rows: Annotated[int | None, _option("Maximum number of rows per shard (250000).")] = None,
    shard_bytes: Annotated[int | None, _option("Maximum size of a shard in bytes (64000000).")] = None,
    shard_seconds: Annotated[float | None, _option("Write a shard at least every so many seconds (60).")] = None,
    device: Annotated[str | None, _option("Device of the model, if not that of the fit.")] = None,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Score every training example into the run: self-influence, loss, and the features that `explain` uses.

    After an interruption, the same command resumes scoring.
    """
    given = {"batch": batch, "precision": precision}
    limits = {"shard_rows": shard_rows, "shard_bytes": shard_bytes, "shard_seconds": shard_seconds}
    with _resumable():
        _commands().score(run, given | limits | {"features": features}, device, trust, json)


_Refine = Annotated[
    int | None, typer.Option(min=1, help="Refine exact scores by this many products with the curvature per query.")
]
_Training = Annotated[
    Path | None, typer.Option(help="Checkpoint folder of the Trainer, from which --refine takes its damping.")
]


def explain(
    run: _Run,
    row: Annotated[list[int] | None, typer.Option(help="A row of the run to explain; can be repeated.")] = None,
    id: Annotated[list[str] | None, typer.Option(help="The id of a row to explain; can be repeated.")] = None,
    queries: Annotated[
        Path | None, typer.Option(help="File of new examples to explain, with the dataset's columns (needs the model).")
    ] = None,
    k: Annotated[int, typer.Option("-k", "--top", min=1, help="Number of proponents, and of opponents, to show.")] = 10,
    normalize: Annotated[
        str | None,
        typer.Option(
            help="gradient or features scales gradients or stored features to length 1; metric gives cosines in the "
            "metric of the curvature."
        ),
    ] = None,
    same_label: Annotated[bool, typer.Option("--same-label", help="Only examples with the query's label.")] = False,
    top_labels: Annotated[
        int | None,
        typer.Option(help="Only examples with one of this many most probable labels of the query (needs the model)."),
    ] = None,
    exclude: Annotated[
        str, typer.Option(help="Examples to exclude: self, duplicates (the query and its exact duplicates) or none.")
    ] = "self",
    exact: Annotated[bool, typer.Option("--exact", help="Load the model and rescore candidates exactly.")] = False,
    shortlist: Annotated[
        int | None, typer.Option(min=2, help="Number of candidates that --exact rescores (2,000); in small runs, all.")
    ] = None,
    refine: _Refine = None,
    training: _Training = None,
    out: Annotated[Path | None, typer.Option(help="Also write the results to this Parquet or CSV file.")] = None,
    texts: _Texts = None,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Show the training examples that most lower (proponents) or raise (opponents) the loss of an example.

    Rows are explained from stored features, without the model; --exact and --queries load it.
    """
    options = {"k": k, "normalize": normalize, "same_label": same_label, "top_labels": top_labels}
    options |= {"exclude": None if exclude == "none" else exclude, "shortlist": shortlist, "refine": refine}
    if training is not None and refine is None:
        raise typer.BadParameter("--training says how --refine is damped: pass --refine too, such as --refine 3.")
    exact |= refine is not None
    _commands().explain(run, row or [], id or [], queries, options, exact, training, out, texts, trust, json)


def clean(
    run: _Run,
    drop: Annotated[
        str | None, typer.Option(help="Drop the rows of highest score: a share such as 5%, or a number of rows.")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(help="Keep only the rows of lowest score: a share such as 90%, or a number of rows.")
    ] = None,
    above: Annotated[float | None, typer.Option(help="Drop rows with a score above this number.")] = None,
    below: Annotated[float | None, typer.Option(help="Drop rows with a score below this number.")] = None,
    by: Annotated[str, typer.Option(help="Column to use as the score.")] = "self_influence",
    per_class: Annotated[bool, typer.Option("--per-class", help="Apply the share within each label.")] = False,
    chosen: Annotated[
        Path | None,
        typer.Option("--from", help="Use the decisions in this file, written by --decisions or exported by the page."),
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(help="Write every row's decision to this Parquet or CSV file.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the dataset without the dropped rows to this path.")] = None,
    json: _Json = False,
) -> None:
    """Decide which rows to drop, and write the dataset without them in its own format."""
    amounts = {"drop": drop, "keep": keep, "above": above, "below": below}
    _commands().clean(run, amounts, by, per_class, chosen, decisions, out, json)


def check(
    run: _Run,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move damaged shards aside and score their rows again.")
    ] = False,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Check every file of a run; exit with code 1 if anything is damaged or missing."""
    with _resumable():
        _commands().check(run, repair, trust, json)


def info(run: _Run, texts: _Texts = None, json: _Json = False) -> None:
    """Describe a run: its method, its progress, and its examples of highest self-influence."""
    _commands().info(run, texts, json)


def serve(
    run: _Run,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free port.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines can reach needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(help="Token for making decisions; from other machines, also for reading.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A further host name to open the page at, such as that of a proxy; can be repeated."),
    ] = None,
    model: Annotated[bool, typer.Option("--model", help="Also load the model, to explain new examples.")] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Serve a page of a run: browse examples, explain them, and decide which to drop or relabel."""
    from eigentrace.cli.paging import serve as start

    _hide_bars()
    start(run, port, host, token, allow_host or [], model, trust, open_, json)


def report(
    run: _Run,
    out: Annotated[Path | None, typer.Option(help="HTML file to create; RUN/page.html by default.")] = None,
    rows: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of examples of highest self-influence to include; the page also has their proponents and "
            "opponents, and a sample of the others.",
        ),
    ] = 300,
    trust: _Trust = False,
    json: _Json = False,
) -> None:
    """Write the page of a run as one HTML file, which can be shared."""
    from eigentrace.cli.paging import report as write

    write(run, out, rows, trust, json)
