"""Translate with a trained network: greedily, or by beam search with length normalisation.

Beam search compares translations as the example of Flax that the paper names: Y, its end counted, is worth
log p(Y) / ((5 + |Y|) / 6)^0.6. It stops by a rule of its own, when as many translations of a sentence have ended as the
beam is wide.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from experiments.translation.parts.corpora import BEGIN, END, LONGEST, PAD
from harness.models import DecoderBlock, Transformer, attend

ALPHA = 0.6
# Largest number of tokens of translations of phrases: a poorly trained network never emits END.
SMALL_LONGEST = 20
# Tokens that translations must not contain.
_NEVER = [PAD, BEGIN]
# Greedy search drops finished sentences when at most this share of a batch is unfinished.
_SHRINK = 0.75


@torch.no_grad()
def translated(
    model: Transformer, sources: Tensor, *, beam: int = 1, tokens: int = 65_536, longest: int = LONGEST
) -> list[list[int]]:
    """Translate sentences on the device of the model, in bfloat16 on a GPU.

    Args:
        model: The network, which is put in eval mode.
        sources: (N, S), with END and padding.
        beam: Beam width; 1 for greedy search.
        tokens: Batch size in source tokens, including padding, times the beam width.
        longest: Largest number of tokens of a translation.

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
    """Return the length-normalised score of a translation; `length` includes END."""
    return log_probability / ((5 + length) / 6) ** ALPHA


def _batches(sources: Tensor, tokens: int) -> Iterator[Tensor]:
    """Yield the rows of batches, longest sentences first."""
    lengths = (sources != PAD).sum(dim=1).cpu()
    order = torch.argsort(lengths, descending=True, stable=True)
    start = 0
    while start < len(order):
        count = max(1, tokens // max(1, int(lengths[order[start]])))
        yield order[start : start + count].to(sources.device)
        start += count


class Decoding:
    """Incremental decoding with cached keys and values."""

    def __init__(self, model: Transformer, memory: Tensor, mask: Tensor) -> None:
        self.model, self.mask, self.place = model, mask, 0
        self.blocks = [_Block(block, memory) for block in model.decoder]

    def next(self, tokens: Tensor) -> Tensor:  # (R,) -> (R, words)
        """Append a token to each translation; return the log-probabilities of the next tokens."""
        # Filled on the device: a copy from the CPU would synchronise at every token.
        x = self.model.embed(tokens[:, None], torch.full((1, 1), self.place, device=tokens.device))
        for block in self.blocks:
            x = block(x, self.mask)
        self.place += 1
        logits = self.model.head(self.model.last_norms[1](x)[:, 0])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits[:, _NEVER] = float("-inf")
        return logits.log_softmax(dim=1)

    def take(self, rows: Tensor) -> None:
        """Continue with selected translations, in a new order and possibly repeated."""
        self.mask = self.mask[rows]
        for block in self.blocks:
            block.take(rows)


class _Block:
    """A decoder block with cached keys and values of the source and of previous positions."""

    def __init__(self, block: nn.Module, memory: Tensor) -> None:
        assert isinstance(block, DecoderBlock)
        self.block = block
        self.across = block.cross.key_value(memory).chunk(2, dim=-1)
        self.own: tuple[Tensor, ...] = tuple(t[:, :0] for t in self.across)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:  # (R, 1, width), like what it returns
        block = self.block
        x = block.residual(x, block.norms[0], self._own)
        x = block.residual(x, block.norms[1], lambda x: self._across(x, mask))
        return block.residual(x, block.norms[2], block.feed_forward)

    def _own(self, x: Tensor) -> Tensor:
        layer = self.block.attention
        query, *new = layer.qkv(x).chunk(3, dim=-1)
        self.own = tuple(torch.cat(pair, dim=1) for pair in zip(self.own, new, strict=True))
        key, value = self.own
        return layer.out(attend(query, key, value, layer.heads, causal=False))

    def _across(self, x: Tensor, mask: Tensor) -> Tensor:
        layer = self.block.cross
        key, value = self.across
        return layer.out(attend(layer.query(x), key, value, layer.heads, causal=False, mask=mask))

    def take(self, rows: Tensor) -> None:
        self.own, self.across = (tuple(table[rows] for table in pair) for pair in (self.own, self.across))


def _greedy(model: Transformer, source: Tensor, longest: int, _: int = 1) -> list[list[int]]:
    mask = source != PAD
    decoding = Decoding(model, model.encode(source, mask), mask)
    rows = torch.arange(len(source), device=source.device)
    going = torch.ones_like(rows, dtype=torch.bool)
    said = torch.full((len(source), 1), BEGIN, device=source.device)
    found: list[list[int]] = [[] for _ in source]
    while len(rows) and said.shape[1] <= longest:
        token = decoding.next(said[:, -1]).argmax(dim=1)
        said = torch.cat([said, token[:, None]], dim=1)
        ended = going & (token == END)
        if ended.any():
            _store(found, rows[ended], said[ended, 1:-1])
            going &= ~ended
            left = going.nonzero().flatten()
            # Finished sentences are dropped in groups: a GPU loads new kernels for every new batch size.
            if len(left) <= _SHRINK * len(rows):
                rows, said, going = rows[left], said[left], going[left]
                decoding.take(left)
    _store(found, rows[going], said[going, 1:])
    return found


def _store(found: list[list[int]], rows: Tensor, said: Tensor) -> None:
    for row, tokens in zip(rows.tolist(), said.tolist(), strict=True):
        found[row] = tokens


def _beams(model: Transformer, source: Tensor, longest: int, beam: int) -> list[list[int]]:
    """Run beam search; the beams of one sentence are adjacent rows."""
    device = source.device
    mask = source != PAD
    decoding = Decoding(model, *(t.repeat_interleave(beam, dim=0) for t in (model.encode(source, mask), mask)))
    rows = torch.arange(len(source), device=device)
    said = torch.full((len(source), beam, 1), BEGIN, device=device)
    # All beams start equal, so only the first counts at first.
    scores = torch.full((len(source), beam), float("-inf"), device=device)
    scores[:, 0] = 0.0
    best = [(float("-inf"), list[int]()) for _ in source]
    done = torch.zeros(len(source), dtype=torch.long, device=device)
    for length in range(1, longest + 1):
        after = scores[:, :, None] + decoding.next(said[:, :, -1].flatten()).unflatten(0, (-1, beam))
        # Twice the beam width, since up to a beam width of candidates may end at this step.
        values, places = after.flatten(1).topk(min(2 * beam, after[0].numel()), dim=1)
        token, parent = places % after.shape[2], places // after.shape[2]
        tried = torch.cat([said.gather(1, parent[:, :, None].expand(-1, -1, length)), token[:, :, None]], dim=2)
        ended = (token == END) & values.isfinite()
        # An ended candidate counts only if it is within the beam width, like others.
        here = ended & (torch.arange(values.shape[1], device=device) < beam)
        _compare(best, rows, worth(values, length), tried[:, :, 1:-1], here)
        done += here.sum(dim=1)
        values = values.masked_fill(token == END, float("-inf"))
        scores, chosen = values.topk(beam, dim=1)
        said = tried.gather(1, chosen[:, :, None].expand(-1, -1, length + 1))
        followed = beam * torch.arange(len(rows), device=device)[:, None] + parent.gather(1, chosen)
        if length == longest:
            _compare(best, rows, worth(scores, length), said[:, :, 1:], (done < beam)[:, None] & scores.isfinite())
            break
        going = (done < beam) & scores[:, 0].isfinite()
        rows, said, scores, done = (t[going] for t in (rows, said, scores, done))
        if not len(rows):
            break
        decoding.take(followed[going].flatten())
    return [tokens for _, tokens in best]


def _compare(
    best: list[tuple[float, list[int]]], rows: Tensor, values: Tensor | float, said: Tensor, there: Tensor
) -> None:
    """Return the best translation of each sentence."""
    assert isinstance(values, Tensor)
    which, place = there.nonzero(as_tuple=True)
    for row, value, tokens in zip(
        rows[which].tolist(), values[which, place].tolist(), said[which, place].tolist(), strict=True
    ):
        if value > best[row][0]:
            best[row] = (value, tokens)
