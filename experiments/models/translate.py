"""Translations by a trained network: greedy, or by beam search with length normalisation.

Beam search compares translations as the example of Flax that the paper names: Y, its end counted, is worth
log p(Y) / ((5 + |Y|) / 6)^0.6. It stops by a rule of its own, when as many translations of a sentence have ended as the
beam is wide. Nothing is kept from one step to the next but tokens: all positions are computed again, which for
sentences costs little on a GPU.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from bench.models import Transformer
from experiments.translation import BEGIN, END, LONGEST, PAD

ALPHA = 0.6
# What no translation holds.
_NEVER = [PAD, BEGIN]


@torch.no_grad()
def translated(
    model: Transformer, sources: Tensor, *, beam: int = 1, tokens: int = 16_384, longest: int = LONGEST
) -> list[list[int]]:
    """Translate sentences on the device of the model, in bfloat16 on a GPU.

    Args:
        model: The network. It is put in eval mode.
        sources: (N, S), each ended by END and padded.
        beam: Translations that are followed at a time; 1 takes the most probable token at every step.
        tokens: Of the source, padding included and once per translation followed, that go through the network together.
        longest: Translations end after so many tokens.

    Returns:
        The tokens of each translation, without END.
    """
    model.eval()
    device = model.embedding.weight.device
    found: list[list[int]] = [[] for _ in sources]
    for rows in _batches(sources, max(1, tokens // beam)):
        source = sources[rows]
        source = source[:, : int((source != PAD).sum(dim=1).max())].long().to(device)
        casting = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
        with casting:
            search = _greedy if beam == 1 else _beams
            said = search(model, source, longest, beam)
        for row, one in zip(rows.tolist(), said, strict=True):
            found[row] = one
    return found


def worth(log_probability: Tensor | float, length: int) -> Tensor | float:
    """Return what beam search compares translations of different lengths by; `length` counts END."""
    return log_probability / ((5 + length) / 6) ** ALPHA


def _batches(sources: Tensor, tokens: int) -> Iterator[Tensor]:
    """Yield the rows of one batch after another, the longest sentences first."""
    lengths = (sources != PAD).sum(dim=1).cpu()
    order = torch.argsort(lengths, descending=True, stable=True)
    start = 0
    while start < len(order):
        count = max(1, tokens // max(1, int(lengths[order[start]])))
        yield order[start : start + count].to(sources.device)
        start += count


def _next(model: Transformer, said: Tensor, memory: Tensor, mask: Tensor) -> Tensor:  # (R, words)
    """Return the log-probabilities of what comes after what was said, (R, t)."""
    logits = model.head(model.decode(said, memory, mask)[:, -1]).float()
    logits[:, _NEVER] = float("-inf")
    return logits.log_softmax(dim=1)


def _greedy(model: Transformer, source: Tensor, longest: int, _: int = 1) -> list[list[int]]:
    mask = source != PAD
    memory = model.encode(source, mask)
    rows = torch.arange(len(source), device=source.device)
    said = torch.full((len(source), 1), BEGIN, device=source.device)
    found: list[list[int]] = [[] for _ in source]
    while len(rows) and said.shape[1] <= longest:
        token = _next(model, said, memory, mask).argmax(dim=1)
        said = torch.cat([said, token[:, None]], dim=1)
        ended = token == END
        _store(found, rows[ended], said[ended, 1:-1])
        # Sentences that are done take no more part.
        rows, said, memory, mask = (t[~ended] for t in (rows, said, memory, mask))
    _store(found, rows, said[:, 1:])
    return found


def _store(found: list[list[int]], rows: Tensor, said: Tensor) -> None:
    for row, tokens in zip(rows.tolist(), said.tolist(), strict=True):
        found[row] = tokens


def _beams(model: Transformer, source: Tensor, longest: int, beam: int) -> list[list[int]]:
    """Follow the most probable beginnings of each sentence; beams of one sentence stand one after the other."""
    device = source.device
    mask = source != PAD
    memory = model.encode(source, mask)
    rows = torch.arange(len(source), device=device)
    said = torch.full((len(source), beam, 1), BEGIN, device=device)
    # All begin alike: at first there is only one.
    scores = torch.full((len(source), beam), float("-inf"), device=device)
    scores[:, 0] = 0.0
    best = [(float("-inf"), list[int]()) for _ in source]
    done = torch.zeros(len(source), dtype=torch.long, device=device)
    for length in range(1, longest + 1):
        wide = [t.repeat_interleave(beam, dim=0) for t in (memory, mask)]
        after = scores[:, :, None] + _next(model, said.flatten(0, 1), *wide).unflatten(0, (-1, beam))
        # Twice as many as are followed: as many as end at this step may be among them.
        values, places = after.flatten(1).topk(min(2 * beam, after[0].numel()), dim=1)
        token, parent = places % after.shape[2], places // after.shape[2]
        tried = torch.cat([said.gather(1, parent[:, :, None].expand(-1, -1, length)), token[:, :, None]], dim=2)
        ended = (token == END) & values.isfinite()
        # An end counts only among the first, as one that is followed would.
        here = ended & (torch.arange(values.shape[1], device=device) < beam)
        _compare(best, rows, worth(values, length), tried[:, :, 1:-1], here)
        done += here.sum(dim=1)
        values = values.masked_fill(token == END, float("-inf"))
        scores, chosen = values.topk(beam, dim=1)
        said = tried.gather(1, chosen[:, :, None].expand(-1, -1, length + 1))
        if length == longest:
            _compare(best, rows, worth(scores, length), said[:, :, 1:], (done < beam)[:, None] & scores.isfinite())
            break
        going = (done < beam) & scores[:, 0].isfinite()
        rows, said, scores, memory, mask, done = (t[going] for t in (rows, said, scores, memory, mask, done))
        if not len(rows):
            break
    return [tokens for _, tokens in best]


def _compare(
    best: list[tuple[float, list[int]]], rows: Tensor, values: Tensor | float, said: Tensor, there: Tensor
) -> None:
    """Keep the best translation of each sentence."""
    assert isinstance(values, Tensor)
    which, place = there.nonzero(as_tuple=True)
    for row, value, tokens in zip(
        rows[which].tolist(), values[which, place].tolist(), said[which, place].tolist(), strict=True
    ):
        if value > best[row][0]:
            best[row] = (value, tokens)
