"""Selection of parameters: trainable ones, name patterns, the top of the model, or a function."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Real

import torch
from torch import Tensor, nn

from eigentrace.errors import TaskError

Params = str | Sequence[str] | Callable[[str, Tensor], bool]

# bfloat16 has the range of float32, but fewer digits: `check_task` warns about it.
_WIDE_ENOUGH = (torch.float64, torch.float32, torch.bfloat16)
_TOP = re.compile(r"^(?:top|last)\s+(\d+(?:\.\d+)?)\s*%$")


@dataclass(frozen=True)
class Coverage:
    """Number and share of the model's parameters that are selected."""

    selected: int
    total: int
    names: tuple[str, ...]
    without_rule: Mapping[str, str] = field(default_factory=dict)
    """Selected parameters without a layerwise rule, which need a slower engine, with the reason."""

    @property
    def fraction(self) -> float:
        """Share of the model's parameters that are selected."""
        return self.selected / self.total

    def __repr__(self) -> str:
        slower = f", {len(self.without_rule)} by a slower engine" if self.without_rule else ""
        return f"<Coverage: {self.selected:,} of {self.total:,} parameters, {len(self.names)} tensors{slower}>"

    def __str__(self) -> str:
        share = f"{100 * self.fraction:.3g}% of {self.total:,} parameters"
        attributed = f"{share} ({self.selected:,} in {len(self.names)} tensors)"
        if not self.without_rule:
            return attributed
        reasons = "; ".join(sorted(set(self.without_rule.values())))
        return (
            f"{attributed}, {len(self.without_rule)} of them ({some(list(self.without_rule), 3)}) by a slower engine: "
            f"{reasons}"
        )


def select_params(model: nn.Module, params: Params) -> dict[str, nn.Parameter]:
    """Return the selected parameters by name, in the model's order; tied parameters once.

    Args:
        model: The model.
        params: `"trainable"` (every parameter with `requires_grad`), `"all"`, `"last layer"`, `"top 20%"` (whole
            tensors, from the output end, until they make up that share), a glob pattern over names or a list of
            them, or a function of (name, parameter). All but the first ignore `requires_grad`.
    """
    aliases = aliases_of(model)
    everything = {names[0]: parameter for parameter, names in aliases}
    if not everything:
        raise TaskError(f"{type(model).__name__} has no parameters, so there is nothing to attribute to.")
    _check_loaded(everything)
    chosen = _choose(model, everything, {names[0]: names for _, names in aliases}, params)
    if not chosen:
        raise TaskError(
            f"params={params!r} matches none of the {len(everything)} parameters of {type(model).__name__} "
            f"({some(list(everything))}). Pass a pattern that matches these names, or 'trainable' after "
            "unfreezing some."
        )
    _check(chosen)
    return chosen


def coverage_of(model: nn.Module, chosen: Mapping[str, Tensor]) -> Coverage:
    """Count the selected parameters and all parameters of the model; tied ones once."""
    total = sum(p.numel() for p in model.parameters())
    return Coverage(sum(p.numel() for p in chosen.values()), total, tuple(chosen))


def match_values(
    aliases: Mapping[str, Sequence[str]], values: float | Mapping[str, float], what: str
) -> dict[str, float]:
    """Return the number of each parameter: one for all, or that of the first matching glob pattern, else 0."""
    if not isinstance(values, Mapping):
        values = {"*": values}
    for pattern, value in values.items():
        if not isinstance(value, Real) or not 0 <= value < float("inf"):
            raise TaskError(f"{what} must be a finite number that is not negative, got {value!r} for {pattern!r}.")
        if not any(_matches(names, pattern) for names in aliases.values()):
            raise TaskError(
                f"{what} pattern {pattern!r} matches none of the selected parameters ({some(list(aliases))})."
            )
    return {
        name: next((float(value) for pattern, value in values.items() if _matches(names, pattern)), 0.0)
        for name, names in aliases.items()
    }


def _matches(names: Sequence[str], pattern: str) -> bool:
    # A tied parameter has several names: "lm_head.*" must also match a matrix shared with the embedding.
    return any(fnmatchcase(name, pattern) for name in names)


def aliases_of(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Return each distinct parameter with all of its names."""
    by_id: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), (parameter, []))[1].append(name)
    return list(by_id.values())


def _choose(
    model: nn.Module, everything: dict[str, nn.Parameter], aliases: dict[str, list[str]], params: Params
) -> dict[str, nn.Parameter]:
    if callable(params):
        return {name: p for name, p in everything.items() if params(name, p)}
    if params == "trainable":
        return {name: p for name, p in everything.items() if p.requires_grad}
    if params == "all":
        return everything
    if params == "last layer":
        layer = _by_last_use(model)[-1][1].rpartition(".")[0]
        return {n: p for n, p in everything.items() if any(a.rpartition(".")[0] == layer for a in aliases[n])}
    if isinstance(params, str) and (top := _TOP.match(params)):
        return _top(model, everything, float(top.group(1)) / 100)
    patterns = [params] if isinstance(params, str) else params
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        kinds = {type(item).__name__ for item in params} if isinstance(params, list | tuple) else ""
        raise TaskError(
            "params must be a string, a list of glob patterns over names, or a function of (name, parameter), got "
            f"{type(params).__name__}{f' of {sorted(kinds)}' if kinds else ''}."
        )
    unmatched = [p for p in patterns if not any(_matches(names, p) for names in aliases.values())]
    if unmatched and len(patterns) > 1:
        raise TaskError(f"params patterns {unmatched} match no parameter ({some(list(everything))}).")
    return {name: p for name, p in everything.items() if any(_matches(aliases[name], q) for q in patterns)}


def _by_last_use(model: nn.Module) -> list[tuple[str, str]]:
    """Return (name, last name) of all parameters, in the order of last names: a tied head comes last."""
    last: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = last.pop(id(parameter), (name, name))[0]
        last[id(parameter)] = (first, name)
    return list(last.values())


def _top(model: nn.Module, everything: dict[str, nn.Parameter], share: float) -> dict[str, nn.Parameter]:
    wanted = share * sum(p.numel() for p in everything.values())
    chosen: set[str] = set()
    for name, _ in reversed(_by_last_use(model)):
        if sum(everything[n].numel() for n in chosen) >= wanted:
            break
        chosen.add(name)
    return {name: p for name, p in everything.items() if name in chosen}


def _check_loaded(everything: Mapping[str, Tensor]) -> None:
    for name, parameter in everything.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TaskError(
                f"Parameter {name!r} is an UninitializedParameter of a lazy module. Run the model on a batch first."
            )
        if parameter.device.type == "meta":
            raise TaskError(f"Parameter {name!r} is on the meta device and has no values: load the weights first.")


def _check(chosen: Mapping[str, Tensor]) -> None:
    for name, parameter in chosen.items():
        if parameter.is_complex() or not parameter.is_floating_point():
            raise TaskError(
                f"Parameter {name!r} has type {parameter.dtype}, which has no real gradient. Leave it out of `params` "
                "(for a quantised model, select the floating-point layers or adapters)."
            )
    devices = {p.device for p in chosen.values()}
    if len(devices) > 1:
        raise TaskError(
            f"The selected parameters are on several devices ({', '.join(sorted(map(str, devices)))}). "
            "Move the model to one device, or select parameters on one."
        )
    narrow = [name for name, p in chosen.items() if p.dtype not in _WIDE_ENOUGH]
    if narrow:
        raise TaskError(
            f"Parameter {narrow[0]!r} is stored in {chosen[narrow[0]].dtype}, whose range is too small for "
            "gradients and curvature. Load the model in float32 (`model.float()`), and use precision='bf16' for speed."
        )


def some(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names, and how many more there are."""
    more = f", … {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
