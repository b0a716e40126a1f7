"""Rendering of examples for display: texts, pairs of texts, tokens with their losses, images."""

from eigentrace.rendering.example import Kind, Show, Shown, as_shown
from eigentrace.rendering.pictures import Custom, Images, Tensors
from eigentrace.rendering.texts import Pairs, Texts

__all__ = ["Kind", "Show", "Shown", "as_shown", "Texts", "Pairs", "Images", "Tensors", "Custom"]
