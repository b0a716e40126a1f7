"""Loading of task and data from a Hugging Face model folder and a dataset."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from eigentrace.data import Data
from eigentrace.errors import InputError
from eigentrace.formats.content_hash import content_columns, content_of
from eigentrace.formats.dataset_columns import check_text, class_labels, metadata_of, read_ids
from eigentrace.formats.files import Files, find_files
from eigentrace.formats.records import Records, open_records
from eigentrace.loading.dataset_check import empty_texts
from eigentrace.loading.hugging_face import (
    TASKS,
    TaskName,
    check_folder,
    load_model,
    load_tokenizer,
    longest_input,
    stored_class_names,
    takes_token_types,
)
from eigentrace.loading.image_dataset import ImageDataset, Pictures, check_images, preparation
from eigentrace.loading.inputs import Inputs
from eigentrace.loading.new_examples import NewExamples
from eigentrace.loading.text_dataset import TextDataset
from eigentrace.rendering import Images, Pairs, Show, Texts
from eigentrace.settings import check_counts
from eigentrace.task.parameters import Params
from eigentrace.task.tasks import causal_lm, classification, seq2seq

Check = Callable[[Records, Mapping[str, str], str | None], None]

_ROLES = {
    "text-classification": ("text", "text_pair", "label"),
    "image-classification": ("image", "label"),
    "seq2seq": ("text", "target"),
    "causal-lm": ("text",),
}
_TEXTS = ("text", "text_pair", "target")
_READY = {
    "text-classification": classification,
    "image-classification": classification,
    "seq2seq": seq2seq,
    "causal-lm": causal_lm,
}


def from_folder(
    model: Path | str,
    dataset: Path | str,
    task: TaskName,
    *,
    text: str = "text",
    text_pair: str | None = None,
    target: str = "target",
    label: str = "label",
    image: str = "image",
    id: str | None = None,
    tokenizer: Path | str | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    params: Params = "trainable",
    l2: float | Mapping[str, float] = 0.0,
    device: str | None = None,
    columns: Sequence[str] | None = None,
    split: str | None = None,
    workers: int = 0,
) -> Inputs:
    """Return the task of a saved model, and data of a dataset's rows in their order.

    Args:
        model: A folder written by `save_pretrained`.
        dataset: A CSV, TSV, JSON lines or Parquet file, a pattern, a folder of Parquet files, or a folder written by
            `Dataset.save_to_disk`.
        task: The task that the model was trained for.
        text: The column of texts, for all tasks except image classification.
        text_pair: The column of second texts, for classifiers of text pairs.
        target: The column of target texts of a seq2seq model.
        label: The column of classes, as numbers or as names in the model's config.
        image: The column of images: paths relative to the dataset, or bytes.
        id: The column of ids; examples are identified by row if not given.
        tokenizer: The folder of the tokenizer, if it is not the model's.
        max_length: Maximum number of tokens of a text; the model's maximum if not given.
        batch_size: Number of examples per batch. Scores do not depend on it.
        params: The selected parameters; see `eigentrace.task.parameters.select_params`.
        l2: λ of the L2 penalty used in training; see `eigentrace.Task`.
        device: The device of the model; a GPU if available and not given.
        columns: Metadata columns to store with the scores; all small ones if not given.
        split: The split of a folder that contains several.
        workers: Number of processes that read and prepare examples.
    """
    roles = _roles(task, text=text, text_pair=text_pair, target=target, label=label, image=image)
    check_counts(1, batch_size=batch_size, max_length=1 if max_length is None else max_length)
    folder, files = Path(model), find_files(dataset, split)
    check_folder(folder)
    records = _opened(files, roles, id)
    metadata, ids = metadata_of(records, list(roles.values()), id, columns), read_ids(records, id)
    network = load_model(folder, task).to(_place(device))
    if task == "image-classification":
        examples: ImageDataset | TextDataset = _images(records, roles, files.folder, folder, network)
    else:
        examples = _texts(records, roles, Path(tokenizer or folder), network, max_length)
    data = Data(examples, examples.collate, batch_size, ids, workers)
    show, read = _show(records, roles, files.folder, folder), NewExamples(examples, roles, network.config)
    content = partial(content_of, records, content_columns(roles, id))
    remarks = partial(empty_texts, records, _text_columns(roles))
    return Inputs(_READY[task](network, params, l2), data, metadata, files.source, show, read, content, remarks)


def show_folder(
    model: Path | str,
    dataset: Path | str,
    task: TaskName,
    *,
    text: str = "text",
    text_pair: str | None = None,
    target: str = "target",
    label: str = "label",
    image: str = "image",
    id: str | None = None,
    split: str | None = None,
    check: Check | None = None,
    **others: Any,
) -> Show:
    """Return a renderer of a dataset's examples without loading the model; accepts the arguments of `from_folder`.

    `check` is called first, with the dataset's records, the column of each role and the column of ids.
    """
    roles = _roles(task, text=text, text_pair=text_pair, target=target, label=label, image=image)
    files = find_files(dataset, split)
    records = _opened(files, roles, id)
    if check is not None:
        check(records, roles, id)
    return _show(records, roles, files.folder, Path(model))


def _show(records: Records, roles: Mapping[str, str], home: Path, folder: Path) -> Show:
    classes = stored_class_names(folder) if "label" in roles else None
    if "image" in roles:
        return Images(Pictures(records, roles["image"], home), len(records), classes=classes)
    second = roles.get("target") or roles.get("text_pair")
    if second is not None:
        return Pairs(records, roles["text"], second, classes=classes)
    return Texts(records, roles["text"], classes=classes)


def _place(device: str | None) -> torch.device:
    try:
        return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InputError(f"device must be a torch device such as 'cpu' or 'cuda:0', got {device!r}: {error}") from None


def _roles(task: str, **named: str | None) -> dict[str, str]:
    """Return the column of each role of a task, such as text or label."""
    if task not in TASKS:
        raise InputError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
    return {role: column for role in _ROLES[task] if (column := named[role]) is not None}


def _text_columns(roles: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(column for role, column in roles.items() if role in _TEXTS))


def _opened(files: Files, roles: Mapping[str, str], identity: str | None) -> Records:
    """Open a dataset, and check that all required columns exist, have the right type and contain no nulls."""
    wanted = dict(roles) if identity is None else {**roles, "id": identity}
    records = open_records(files, as_text=list(wanted.values()))
    records.check_columns(**wanted)
    check_text(records, **{role: column for role, column in roles.items() if role in _TEXTS})
    records.refuse_nulls(*_text_columns(roles))
    if "image" in roles:
        check_images(records, roles["image"])
    return records


def _texts(
    records: Records, roles: Mapping[str, str], home: Path, network: nn.Module, max_length: int | None
) -> TextDataset:
    tokenizer = load_tokenizer(home, network)
    return TextDataset(
        records,
        tokenizer,
        roles["text"],
        pair=roles.get("text_pair"),
        target=roles.get("target"),
        labels=_labels(records, roles["label"], network) if "label" in roles else None,
        longest=longest_input(tokenizer, network, max_length),
        token_types=takes_token_types(tokenizer, network),
    )


def _images(records: Records, roles: Mapping[str, str], home: Path, folder: Path, network: nn.Module) -> ImageDataset:
    labels = _labels(records, roles["label"], network)
    mode = "L" if getattr(network.config, "num_channels", 3) == 1 else "RGB"
    return ImageDataset(records, roles["image"], home, preparation(folder), labels, mode)


def _labels(records: Records, column: str, network: nn.Module) -> np.ndarray:  # (N,)
    config: Any = network.config
    return class_labels(records, column, config.label2id or {}, config.num_labels)
