"""What examples look like to people: texts, pairs of texts, tokens with their losses, images."""

from eigentrace.shown.content import Kind, Show, Shown, as_shown
from eigentrace.shown.pictures import Custom, Images, Tensors
from eigentrace.shown.texts import Pairs, Texts

__all__ = ["Kind", "Show", "Shown", "as_shown", "Texts", "Pairs", "Images", "Tensors", "Custom"]
