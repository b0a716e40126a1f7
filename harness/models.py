"""Models to measure: plain PyTorch, random weights from a fixed seed, synthetic batches.

Every batch is a tuple whose last item is the targets: `model(*inputs)` returns their logits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import eigentrace as et

Batch = tuple[Tensor, ...]


class SelfAttention(nn.Module):
    """Self-attention, optionally causal."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend; a mask (B, T) marks valid positions, a mask (B, T, T) those that each position attends to."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        return self.out(attend(query, key, value, self.heads, causal=self.causal and mask is None, mask=mask))


class CrossAttention(nn.Module):
    """Attention to another sequence, the memory."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend to the memory; a mask (B, S) marks its valid positions, (B, T, S) for each position separately."""
        key, value = self.key_value(memory).chunk(2, dim=-1)
        return self.out(attend(self.query(x), key, value, self.heads, causal=False, mask=mask))


def attend(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool, mask: Tensor | None = None
) -> Tensor:  # (B, T, width)
    """Split into heads, attend (only to keys in the mask, if there is one), and merge the heads."""
    query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key, value))
    seen = None if mask is None else mask[:, None] if mask.dim() == 3 else mask[:, None, None, :]
    return F.scaled_dot_product_attention(query, key, value, seen, is_causal=causal).transpose(1, 2).flatten(2)


def feed_forward(width: int, hidden: int, activation: nn.Module) -> nn.Sequential:
    """Return the feed-forward layers of a transformer block."""
    return nn.Sequential(nn.Linear(width, hidden), activation, nn.Linear(hidden, width))


class PreNormBlock(nn.Module):
    """A pre-norm transformer block, as in ViT and GPT-2."""

    def __init__(self, width: int, heads: int, activation: nn.Module, *, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attention = SelfAttention(width, heads, causal=causal)
        self.feed_forward = feed_forward(width, 4 * width, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Transform a sequence."""
        x = x + self.attention(self.norms[0](x))
        return x + self.feed_forward(self.norms[1](x))


class ViT(nn.Module):
    """A vision transformer with a class token and learned positions."""

    def __init__(self, width: int, depth: int, heads: int, *, image: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(PreNormBlock(width, heads, nn.GELU(), causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, image, image) -> (B, classes)
        """Classify."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class GPT2(nn.Module):
    """A decoder with learned positions, whose output layer is tied to its embedding."""

    def __init__(self, width: int, depth: int, heads: int, *, words: int = 50257, positions: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Embedding(positions, width)
        activation = nn.GELU(approximate="tanh")
        self.blocks = nn.Sequential(*(PreNormBlock(width, heads, activation, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, words)
        """Predict the next token at every position."""
        where = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.positions(where))))


class EncoderBlock(nn.Module):
    """An encoder block of the original Transformer, with norms after each residual or before each layer."""

    def __init__(self, width: int, heads: int, *, norm_first: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.residual = Residual(norm_first, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = SelfAttention(width, heads)
        self.feed_forward = feed_forward(width, 4 * width, nn.ReLU())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Transform a source sequence."""
        x = self.residual(x, self.norms[0], lambda x: self.attention(x, mask))
        return self.residual(x, self.norms[1], self.feed_forward)


class DecoderBlock(nn.Module):
    """A decoder block of the original Transformer, which also attends to the encoder's output."""

    def __init__(self, width: int, heads: int, *, norm_first: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.residual = Residual(norm_first, dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = SelfAttention(width, heads, causal=True)
        self.cross = CrossAttention(width, heads)
        self.feed_forward = feed_forward(width, 4 * width, nn.ReLU())

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, own_mask: Tensor | None = None) -> Tensor:
        """Transform a target sequence; a mask of its own, if given, replaces the causal mask of self-attention."""
        x = self.residual(x, self.norms[0], lambda x: self.attention(x, own_mask))
        x = self.residual(x, self.norms[1], lambda x: self.cross(x, memory, mask))
        return self.residual(x, self.norms[2], self.feed_forward)


class Residual(nn.Module):
    """A residual connection around a layer, with the norm after it or before the layer, and dropout in training."""

    def __init__(self, norm_first: bool, dropout: float) -> None:
        super().__init__()
        self.norm_first, self.dropout = norm_first, dropout

    def forward(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a layer."""
        y = layer(norm(x) if self.norm_first else x)
        x = x + (F.dropout(y, self.dropout) if self.training and self.dropout else y)
        return x if self.norm_first else norm(x)


class Transformer(nn.Module):
    """An encoder-decoder with sinusoidal positions and one embedding for source, target and output."""

    positions: Tensor

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        *,
        words: int = 32000,
        longest: int = 256,
        norm_first: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(words, width)
        self.encoder, self.decoder = (
            nn.ModuleList(block(width, heads, norm_first=norm_first, dropout=dropout) for _ in range(depth))
            for block in (EncoderBlock, DecoderBlock)
        )
        # With pre-norm blocks, the output of the last block is not normalised yet.
        self.last_norms = nn.ModuleList(nn.LayerNorm(width) if norm_first else nn.Identity() for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.head.weight = self.embedding.weight
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        angles = torch.arange(longest)[:, None] * rates
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1), persistent=False)

    def embed(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:  # (B, T) -> (B, T, width)
        """Embed tokens and add positions, by default those from 0 on."""
        scale = math.sqrt(self.embedding.embedding_dim)
        positions = self.positions[: tokens.shape[1]] if places is None else self.positions[places]
        x = scale * self.embedding(tokens) + positions
        return F.dropout(x, self.dropout) if self.training and self.dropout else x

    def forward(self, source: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:  # -> (B, T, words)
        """Predict the next target token at every position.

        Args:
            source: (B, S)
            target: (B, T); padding must be last, so that no earlier position attends to it.
            mask: (B, S), the valid positions of the source; default: all.
        """
        return self.head(self.decode(target, self.encode(source, mask), mask))

    def encode(
        self, source: Tensor, mask: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:  # (B, S) -> (B, S, width)
        """Encode the source."""
        memory = self.embed(source, places)
        for block in self.encoder:
            memory = block(memory, mask)
        return self.last_norms[0](memory)

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        own_mask: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:  # -> (B, T, width)
        """Return the decoder's hidden states, the input of the output layer."""
        x = self.embed(target, places)
        for block in self.decoder:
            x = block(x, memory, mask, own_mask)
        return self.last_norms[1](x)


class Bottleneck(nn.Module):
    """A bottleneck block of ResNet-50: 1×1, 3×3 (with the stride) and 1×1 convolutions, and a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        shapes = ((inputs, width, 1), (width, width, 3), (width, outputs, 1))
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, size, stride if size == 3 else 1, size // 2, bias=False) for a, b, size in shapes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in shapes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Transform a feature map."""
        y = F.relu(self.norms[0](self.convs[0](x)))
        y = F.relu(self.norms[1](self.convs[1](y)))
        return F.relu(self.norms[2](self.convs[2](y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of bottleneck blocks."""

    def __init__(self, width: int, depths: tuple[int, ...], *, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                blocks.append(Bottleneck(inputs, width * 2**stage, 2 if stage and not number else 1))
                inputs = 4 * width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, h, w) -> (B, classes)
        """Classify."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:  # (*b, classes), (*b) -> (*b)
    """Return one loss per target, computed in float32 as in training."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def token_task(model: nn.Module) -> et.Task:
    """Create the task of a language model, where an example's loss is the sum over its tokens."""
    return et.Task(
        model,
        outputs=lambda model, batch: model(*batch[:-1]),
        output_loss=lambda logits, batch: cross_entropy(logits, batch[-1]).sum(dim=1),
    )


Draw = Callable[[int, torch.Generator], Batch]


def images(size: int, classes: int) -> Draw:
    """Draw random images and labels, on the device of the generator."""

    def draw(count: int, generator: torch.Generator) -> Batch:
        device = generator.device
        pixels = torch.randn(count, 3, size, size, generator=generator, device=device)
        return pixels, torch.randint(classes, (count,), generator=generator, device=device)

    return draw


def tokens(words: int, length: int, *, source: bool = False) -> Draw:
    """Draw random sentences of equal length: inputs and next tokens, preceded by a source if requested."""

    def draw(count: int, generator: torch.Generator) -> Batch:
        shape = (count, length + 1)
        text = torch.randint(words, shape, generator=generator, device=generator.device)
        before = (text.flip(1)[:, :length].contiguous(),) if source else ()
        return *before, text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return draw


@dataclass(frozen=True)
class Entry:
    """One model to measure."""

    title: str
    build: Callable[[], nn.Module]
    draw: Draw
    batch: int
    """Batch size for projecting gradients."""
    curvature_batch: int
    """Batch size of a curvature product."""
    task: Callable[[nn.Module], et.Task] = token_task

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """Build the model in eval mode on a device, without changing the global random state."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(seed)
            return self.build().eval()

    def examples(self, count: int, device: torch.device, seed: int = 1) -> Batch:
        """Draw a batch on a device."""
        return self.draw(count, torch.Generator(device).manual_seed(seed))


MODELS = {
    "vit_l_32": Entry(
        "ViT-L/32",
        lambda: ViT(1024, 24, 16, image=224, patch=32, classes=1000),
        images(224, 1000),
        512,
        128,
        et.classification,
    ),
    "vit_b_32": Entry(
        "ViT-B/32",
        lambda: ViT(768, 12, 12, image=224, patch=32, classes=1000),
        images(224, 1000),
        2048,
        128,
        et.classification,
    ),
    "resnet_50": Entry("ResNet-50", lambda: ResNet(64, (3, 4, 6, 3)), images(224, 1000), 512, 128, et.classification),
    "transformer_base": Entry(
        "Transformer Base", lambda: Transformer(512, 6, 8), tokens(32000, 32, source=True), 2048, 128
    ),
    "gpt2_small": Entry("GPT-2 small", lambda: GPT2(768, 12, 12), tokens(50257, 256), 128, 16),
}
"""The models of the tables, at their published sizes."""

SMALL = {
    "vit_l_32": Entry(
        "ViT-L/32", lambda: ViT(96, 3, 4, image=56, patch=8, classes=10), images(56, 10), 32, 16, et.classification
    ),
    "vit_b_32": Entry(
        "ViT-B/32", lambda: ViT(64, 4, 4, image=56, patch=8, classes=10), images(56, 10), 32, 16, et.classification
    ),
    "resnet_50": Entry(
        "ResNet-50", lambda: ResNet(16, (1, 1, 1, 1), classes=10), images(64, 10), 32, 16, et.classification
    ),
    "transformer_base": Entry(
        "Transformer Base", lambda: Transformer(64, 2, 4, words=1000), tokens(1000, 32, source=True), 32, 16
    ),
    "gpt2_small": Entry("GPT-2 small", lambda: GPT2(96, 2, 4, words=1000, positions=256), tokens(1000, 128), 16, 8),
}
"""The same architectures with a few hundred thousand parameters, for two CPU cores."""
