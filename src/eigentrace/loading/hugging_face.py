"""Loading of models and tokenizers from Hugging Face folders. Only this module and the callbacks use `transformers`."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from safetensors import SafetensorError, safe_open
from torch import nn

from eigentrace.disk.bounded import check_regular, read_json
from eigentrace.errors import InputError, MismatchError, TaskError, UnsupportedError
from eigentrace.settings import short

TaskName = Literal["text-classification", "image-classification", "seq2seq", "causal-lm"]
TASKS: tuple[str, ...] = get_args(TaskName)
_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "causal-lm": "AutoModelForCausalLM",
}
# How the names of the models' classes end, by task.
_ENDINGS = {
    "text-classification": ("ForSequenceClassification",),
    "image-classification": ("ForImageClassification",),
    "seq2seq": ("ForConditionalGeneration", "MTModel"),
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
}
# Lengths from here on mean no limit: tokenizers without one have a number like 10^30.
_NO_LIMIT = 10**6
_MOST_CLASSES = 2**31
_ADAPTER = "adapter_config.json"
# Entries of config.json that choose the code of attention. transformers downloads and runs the code of any other
# value, also of flash_attention_2 if the package is not installed, which cannot compute in float32 anyway.
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_BUILT_IN = ("eager", "sdpa", "flex_attention", "paged|eager", "paged|sdpa")
# This entry would give another name to the entries above.
_RENAMING = "attribute_map"
# Entries that make transformers import a package of the config's choice, or download kernels of the hub and run them,
# for weights that cannot be differentiated anyway.
_QUANTIZED = ("quantization_config", "compression_config")
# Files of tokenizers and indices of weights may be larger than other JSON files.
_JSON_BYTES = 1 << 30
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece*", "sentencepiece*", "*.spm", "*.bpe*", "merges.txt")


def check_folder(folder: Path) -> None:
    """Raise InputError unless the folder is a Hugging Face model folder; fast, because nothing is loaded."""
    if not folder.is_dir():
        raise InputError(
            f"There is no model folder {folder}. Pass a folder written by save_pretrained. Models of the hub must be "
            "downloaded first (`hf download NAME --local-dir FOLDER`)."
        )
    # Beside a whole model too, it would be loaded by another package, which imports modules that it names.
    if (folder / _ADAPTER).exists():
        raise InputError(
            f"{folder} contains an adapter ({_ADAPTER}) of the model {_base_model(folder)}, expected a whole model "
            "only. Merge both and pass the folder of the result: PeftModel.from_pretrained(base, adapter)"
            ".merge_and_unload().save_pretrained(folder), with the tokenizer saved there, too. To use the "
            "parameters of the adapter only, create the task in a function (package.module:function)."
        )
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder. Pass a folder written by "
            "save_pretrained, or create the task in a function (package.module:function)."
        )


def _base_model(folder: Path) -> str:
    """Return the name of the model that an adapter belongs to, as recorded in its folder."""
    try:
        name = read_json(folder / _ADAPTER).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        name = None
    return short(repr(name), 200) if name else "(not recorded)"


def stored_class_names(folder: Path) -> tuple[str, ...] | None:
    """Return the names of classes 0, 1, 2, … in a model folder's config.json, or None."""
    try:
        names = read_json(folder / "config.json").get("id2label")
        numbered = {int(number): str(name) for number, name in names.items()}
    except (OSError, ValueError, AttributeError):
        return None
    return tuple(numbered[n] for n in range(len(numbered))) if set(numbered) == set(range(len(numbered))) else None


def load_model(folder: Path, task: str) -> nn.Module:
    """Load a trained model in float32, on the CPU; raise TaskError if weights are missing in the folder.

    Weights are read only from safetensors files, because loading a pickle can run any code. Code in the folder is not
    run, nor is code that its config.json names.
    """
    check_files(folder)
    _check_config(folder)
    loader = getattr(_transformers(), _CLASSES[task])
    if not any(folder.glob("*.safetensors")) and (pickled := sorted(folder.glob("*.bin"))):
        raise InputError(
            f"The model in {folder} has its weights in {pickled[0].name}, a pickle, which is not read because it can "
            "contain code. If you trust it, load it yourself and save it again with "
            "model.save_pretrained(folder, safe_serialization=True)."
        )
    try:
        model, report = loader.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # damaged files raise errors of many packages
        raise InputError(_load_failure(folder, task, error)) from error
    _check_classes(folder, model.config)
    missing = sorted(report["missing_keys"])
    if missing:
        raise TaskError(
            f"The model in {folder} was not trained for {task}: {len(missing)} weights are not in the folder (first: "
            f"{missing[0]!r}) and would be random numbers. Pass the folder of the trained model."
        )
    problem = getattr(model.config, "problem_type", None)
    if task == "text-classification" and problem not in (None, "single_label_classification"):
        raise UnsupportedError(
            f"The model in {folder} was trained for {problem}, but text-classification needs one class per example. "
            "Create the task in a function (package.module:function)."
        )
    return model.float()


def check_files(folder: Path) -> None:
    """Raise MismatchError if a file of a model folder, or one that its indices name, is not regular or only holes.

    transformers opens them without a check, and would wait for a pipe or read a device until the memory is full.
    """
    for file in (*folder.glob("*"), *folder.glob("*/*")):
        if not file.is_dir():
            check_regular(file)
    for index in folder.glob("*.index.json"):
        try:
            shards = sorted({str(name) for name in read_json(index, _JSON_BYTES)["weight_map"].values()})
        except MismatchError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{index} is damaged ({short(repr(error))}). Save the model again.") from None
        for shard in shards:
            if Path(shard).name != shard:
                raise InputError(
                    f"{index} names the weights {short(shard, 100)}, expected files of its folder. Save the model "
                    "again."
                )


def _check_config(folder: Path) -> None:
    """Raise InputError if the folder's config.json names code that transformers would import, or download and run."""
    file = folder / "config.json"
    try:
        found = list(_code_named(read_json(file)))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}. Pass a folder written by save_pretrained.") from None
    if found:
        key, value = found[0]
        if key in _QUANTIZED:
            raise InputError(
                f"{file} has {key} = {short(repr(value), 100)}, expected no such entry: gradients need weights "
                "that are not quantized, and reading these could run other code. Load the model without quantization "
                "(model.dequantize()), and save it again."
            )
        raise InputError(
            f"{file} has {key} = {short(repr(value), 100)}, expected {', '.join(_BUILT_IN)} or no such entry: "
            "transformers could download other code for it and run it. Remove the entry to load the model with the "
            "default attention."
        )


def _code_named(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config and of its parts that choose code which is not built into transformers."""
    if isinstance(config, list):
        for part in config:
            yield from _code_named(part)
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if key == _RENAMING or (key in _QUANTIZED and value is not None):
            yield key, value
        elif key in _ATTENTION:
            chosen = value.values() if isinstance(value, dict) else [value]
            yield from ((key, one) for one in chosen if one is not None and one not in _BUILT_IN)
        else:
            yield from _code_named(value)


def _load_failure(folder: Path, task: str, error: Exception) -> str:
    """Return the message for a model that cannot be loaded, without the names of all classes that could be."""
    what = f"The model in {folder} cannot be loaded for {task}"
    kind, classes = _recorded_kind(folder)
    fitting = [known for known in TASKS if any(name.endswith(_ENDINGS[known]) for name in classes)]
    if "Unrecognized configuration class" in str(error):
        saved = f", saved as {', '.join(classes)}" if classes else ""
        advice = (
            f"Pass task={' or '.join(map(repr, fitting))}" if fitting else "Pass the folder of a model for this task"
        )
        return (
            f"{what}: it is a model of type {kind!r}{saved}, which transformers has no {_CLASSES[task]} for. {advice}, "
            "or create the task in a function (package.module:function)."
        )
    return f"{what}: {_cause(folder, error)}"


def _cause(folder: Path, error: Exception) -> str:
    """Return what an error of `transformers` says, and which file of the folder is damaged, if any."""
    said = f"{type(error).__name__}: {short(str(error), 300)}"
    bad = [
        path.name for path in (*sorted(folder.glob("*.json")), *sorted(folder.glob("*.safetensors"))) if _is_bad(path)
    ]
    return f"{bad[0]} is damaged ({said}). Restore it from a copy, or save the model again." if bad else said


def _is_bad(path: Path) -> bool:
    """Return whether a file has no JSON object, or no tensors."""
    try:
        if path.suffix == ".json":
            return not isinstance(read_json(path, _JSON_BYTES), dict)
        check_regular(path)
        with safe_open(path, "pt") as file:
            file.keys()
        return False
    except (OSError, ValueError, SafetensorError):
        return True


def _check_classes(folder: Path, config: Any) -> None:
    """Raise InputError unless the class names of a model's configuration are numbered."""
    found = getattr(config, "label2id", None)
    numbered = isinstance(found, dict) and all(
        isinstance(name, str) and type(number) is int and 0 <= number < _MOST_CLASSES for name, number in found.items()
    )
    if found is not None and not numbered:
        raise InputError(
            f"{folder / 'config.json'}: label2id must map class names to numbers, got {short(found)}. Correct it, or "
            "save the model again."
        )


def _recorded_kind(folder: Path) -> tuple[str | None, list[str]]:
    """Return the model type and the names of the model's classes in a folder's config.json."""
    try:
        found = read_json(folder / "config.json")
        return found.get("model_type"), [str(name) for name in found.get("architectures") or []]
    except (OSError, ValueError, AttributeError, TypeError):
        return None, []


def load_tokenizer(folder: Path, model: nn.Module) -> Any:
    """Load a tokenizer; without a padding token, it pads with its end-of-text token, excluded from mask and labels."""
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        # Recent releases of `transformers` create an empty tokenizer then, for which every word is unknown.
        raise InputError(f"There is no tokenizer in {folder}. Pass the folder of the tokenizer with tokenizer.")
    check_files(folder)
    loader = _transformers().AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files raise errors of many packages
        raise InputError(
            f"The tokenizer in {folder} cannot be loaded: {_cause(folder, error)} | Pass the folder of the "
            "tokenizer with tokenizer."
        ) from error
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    # Classifiers with a decoder model use it to find the last token of a text.
    config: Any = model.config
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def longest_input(tokenizer: Any, model: nn.Module, max_length: int | None) -> int | None:
    """Return the maximum number of tokens of a text: `max_length`, else the limit of tokenizer and model, or None."""
    positions = _num_positions(model)
    known = [n for n in (tokenizer.model_max_length, positions) if isinstance(n, int) and 0 < n < _NO_LIMIT]
    if max_length is None:
        return min(known, default=None)
    if isinstance(positions, int) and max_length > positions > 0:
        raise InputError(
            f"max_length must be at most {positions}, the number of the model's positions, got {max_length}."
        )
    return max_length


def _num_positions(model: nn.Module) -> Any:
    """Return the maximum number of tokens; RoBERTa-like models use positions after the padding entry only."""
    entries = getattr(model.config, "max_position_embeddings", None)
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    unused = [table.padding_idx + 1 for table in tables if getattr(table, "padding_idx", None) is not None]
    return entries - max(unused, default=0) if isinstance(entries, int) else entries


def takes_token_types(tokenizer: Any, model: nn.Module) -> bool:
    """Return whether to pass token types: the tokenizer returns them by default and the model accepts them.

    The model alone does not decide: GPT-2 accepts token types but was trained without them.
    """
    made = "token_type_ids" in tokenizer.model_input_names
    return made and "token_type_ids" in inspect.signature(model.forward).parameters


def load_image_processor(folder: Path) -> Any:
    """Load the folder's image processor, in its version for PIL and NumPy."""
    transformers = _transformers()
    # Before release 5, the argument was `use_fast`.
    plain = {"backend": "pil"} if int(transformers.__version__.split(".")[0]) >= 5 else {"use_fast": False}
    try:
        return transformers.AutoImageProcessor.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, **plain
        )
    except Exception as error:  # damaged files raise errors of many packages
        raise InputError(
            f"The image processor in {folder} cannot be loaded: {_cause(folder, error)} | Prepare the images in a "
            "function (package.module:function)."
        ) from error


def _transformers() -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError(
            "Models in Hugging Face folders need the package transformers, which is not installed. In the clone, run: "
            'pip install -e ".[hf]"'
        ) from None
    return transformers
