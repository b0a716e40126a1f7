"""Models and tokenizers from Hugging Face folders. Only this module and the callbacks know `transformers`."""

import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from torch import nn

from eigentrace.errors import InputError, TaskError, UnsupportedError

TaskName = Literal["text-classification", "image-classification", "seq2seq", "causal-lm"]
TASKS: tuple[str, ...] = get_args(TaskName)
_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal-lm": "AutoModelForCausalLM",
}
# Tokenizers that were never told a length give a number like 10^30.
_NO_LIMIT = 10**6
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece*", "sentencepiece*", "*.spm", "*.bpe*", "merges.txt")


def check_folder(folder: Path) -> None:
    """Refuse what is no Hugging Face model folder, before anything slow is loaded."""
    if not folder.is_dir():
        raise InputError(
            f"There is no model folder {folder}. Give a folder that save_pretrained wrote; a model of the hub must be "
            "downloaded first (`hf download NAME --local-dir FOLDER`)."
        )
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} has no config.json, so it is no Hugging Face model folder. Give a folder that save_pretrained "
            "wrote, or make the task yourself in a function (package.module:function)."
        )


def stored_class_names(folder: Path) -> tuple[str, ...] | None:
    """Read the names of classes 0, 1, 2, … from a model folder, without `transformers`; None where it has none."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("id2label")
        numbered = {int(number): str(name) for number, name in names.items()}
    except (OSError, ValueError, AttributeError):
        return None
    return tuple(numbered[n] for n in range(len(numbered))) if set(numbered) == set(range(len(numbered))) else None


def load_model(folder: Path, task: str) -> nn.Module:
    """Load a trained model in float32, on the CPU; weights that the folder lacks are refused, not drawn at random."""
    loader = getattr(_transformers(), _CLASSES[task])
    try:
        model, report = loader.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"The model in {folder} cannot be loaded for {task}: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise TaskError(
            f"The model in {folder} was not trained for {task}: {len(missing)} weights are not in the folder (first: "
            f"{missing[0]!r}) and would be random numbers. Give the folder of the model after training."
        )
    problem = getattr(model.config, "problem_type", None)
    if task == "text-classification" and problem not in (None, "single_label_classification"):
        raise UnsupportedError(
            f"The model in {folder} was trained for {problem}, and text-classification means one class per example. "
            "Make the task yourself in a function (package.module:function)."
        )
    return model.float()


def load_tokenizer(folder: Path, model: nn.Module) -> Any:
    """Load a tokenizer; one without a padding token pads with its end of text, which masks and labels leave out."""
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        # Recent releases make an empty tokenizer then, to which every word is unknown.
        raise InputError(f"There is no tokenizer in {folder}. Name the folder that has one with tokenizer.")
    loader = _transformers().AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, TypeError, KeyError) as error:
        raise InputError(
            f"No tokenizer can be loaded from {folder}: {error} | Name the folder that has one with tokenizer."
        ) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    # Classifiers over a decoder find the last token of a text by it.
    config: Any = model.config
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def longest_input(tokenizer: Any, model: nn.Module, max_length: int | None) -> int | None:
    """Return how many tokens of a text the model sees: what was asked for, else what tokenizer and model allow."""
    positions = _num_positions(model)
    known = [n for n in (tokenizer.model_max_length, positions) if isinstance(n, int) and 0 < n < _NO_LIMIT]
    if max_length is None:
        return min(known, default=None)
    if isinstance(positions, int) and max_length > positions > 0:
        raise InputError(f"max_length={max_length} is more than the {positions} positions the model has.")
    return max_length


def _num_positions(model: nn.Module) -> Any:
    """Return how many tokens have a position: tables with an entry for padding, as RoBERTa's, count from behind it."""
    entries = getattr(model.config, "max_position_embeddings", None)
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    unused = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    return entries - max(unused, default=0) if isinstance(entries, int) else entries


def takes_token_types(tokenizer: Any, model: nn.Module) -> bool:
    """Tell whether token types belong to the inputs: some tokenizers make them for models that refuse them.

    GPT-2 takes them and was trained without: what the tokenizer gives when it is not told is what counts.
    """
    made = "token_type_ids" in tokenizer.model_input_names
    return made and "token_type_ids" in inspect.signature(model.forward).parameters


def load_image_processor(folder: Path) -> Any:
    """Load the folder's own image processor, the one that computes with PIL and numpy."""
    transformers = _transformers()
    # The choice was called `use_fast` until release 5.
    plain = {"backend": "pil"} if int(transformers.__version__.split(".")[0]) >= 5 else {"use_fast": False}
    try:
        return transformers.AutoImageProcessor.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **plain
        )
    except (OSError, ValueError, ImportError, TypeError, KeyError) as error:
        raise InputError(
            f"The image processor of {folder} cannot be loaded: {error} | Prepare the images yourself in a function "
            "(package.module:function)."
        ) from error


def _transformers() -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError(
            "Models from Hugging Face folders need the package transformers, which is not installed. In the clone: "
            'pip install -e ".[hf]"'
        ) from None
    return transformers
