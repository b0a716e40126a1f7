"""What is written on a figure."""

from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


def words_on(svg: str) -> list[str]:
    """Every line of words on a figure, which must be well formed."""
    return ["".join(node.itertext()).strip() for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def pictures_on(svg: str) -> int:
    """How many pictures are part of a figure."""
    return len(list(ElementTree.fromstring(svg).iter(f"{SVG}image")))
