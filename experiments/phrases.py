"""Short German sentences and their translations, written for this project: words put together by a small grammar.

They stand in for a corpus where there is none, so that every piece of the translation experiments can be run anywhere.
What is measured on them says that the pieces work, and nothing about translation.
"""

from itertools import product

_WHO = (
    ("Der Hund", "The dog"),
    ("Die Katze", "The cat"),
    ("Das Kind", "The child"),
    ("Die Frau", "The woman"),
    ("Der Mann", "The man"),
    ("Mein Vater", "My father"),
    ("Meine Mutter", "My mother"),
    ("Unser Lehrer", "Our teacher"),
    ("Deine Schwester", "Your sister"),
    ("Ihr Bruder", "Her brother"),
    ("Der alte Nachbar", "The old neighbour"),
    ("Das kleine Mädchen", "The little girl"),
    ("Niemand", "Nobody"),
    ("Der Freund von Anna", "Anna's friend"),
)
_DOES = (
    ("schläft", "is sleeping"),
    ("lacht", "is laughing"),
    ("wartet", "is waiting"),
    ("ist müde", "is tired"),
    ("ist sehr glücklich", "is very happy"),
    ("hat Hunger", "is hungry"),
    ("hat keine Zeit", "has no time"),
    ("trinkt Wasser", "drinks water"),
    ("isst einen Apfel", "eats an apple"),
    ("liest ein gutes Buch", "reads a good book"),
    ("sucht den Schlüssel", "is looking for the key"),
    ("spielt im Garten", "plays in the garden"),
    ("sitzt auf dem Stuhl", "sits on the chair"),
    ("wohnt in einem großen Haus", "lives in a big house"),
    ("kommt aus einem kleinen Dorf", "comes from a small village"),
    ("geht zu Fuß zum Bahnhof", "walks to the station"),
    ("wäscht das rote Auto", "washes the red car"),
    ("singt ein altes Lied", "sings an old song"),
    ("hört den Regen", "hears the rain"),
    ("sieht den hellen Mond", "sees the bright moon"),
)
_WHEN = (("", ""), (" heute", " today"), (" im Sommer", " in summer"))


def phrases() -> list[tuple[str, str]]:
    """Return all pairs of German and English sentences, each once, always in the same order."""
    return [
        (f"{who} {does}{when}.", f"{who_en} {does_en}{when_en}.")
        for (who, who_en), (does, does_en), (when, when_en) in product(_WHO, _DOES, _WHEN)
    ]
