"""Short German sentences and their translations, written for this project: words put together by a small grammar.

They stand in for a corpus where there is none, so that every piece of the translation experiments can be run anywhere.
What is measured on them says that the pieces work, and nothing about translation.
"""

from itertools import accumulate, product

import numpy as np

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
_WHEN = (
    ("", ""),
    (" heute", " today"),
    (" im Sommer", " in summer"),
    (" am Abend", " in the evening"),
    (" wie immer", " as always"),
)
_FOREIGN = {
    "fr": (
        (
            ("Le chien", "The dog"),
            ("Le chat", "The cat"),
            ("Mon père", "My father"),
            ("Ma mère", "My mother"),
            ("Notre professeur", "Our teacher"),
            ("Le vieux voisin", "The old neighbour"),
        ),
        (
            ("dort", "is sleeping"),
            ("attend", "is waiting"),
            ("a faim", "is hungry"),
            ("n'a pas le temps", "has no time"),
            ("boit de l'eau", "drinks water"),
            ("mange une pomme", "eats an apple"),
            ("lit un bon livre", "reads a good book"),
            ("joue dans le jardin", "plays in the garden"),
            ("chante une vieille chanson", "sings an old song"),
            ("entend la pluie", "hears the rain"),
        ),
    ),
    "es": (
        (
            ("El perro", "The dog"),
            ("El gato", "The cat"),
            ("Mi padre", "My father"),
            ("Mi madre", "My mother"),
            ("Nuestro maestro", "Our teacher"),
            ("El viejo vecino", "The old neighbour"),
        ),
        (
            ("duerme", "is sleeping"),
            ("espera", "is waiting"),
            ("tiene hambre", "is hungry"),
            ("no tiene tiempo", "has no time"),
            ("bebe agua", "drinks water"),
            ("come una manzana", "eats an apple"),
            ("lee un buen libro", "reads a good book"),
            ("juega en el jardín", "plays in the garden"),
            ("canta una vieja canción", "sings an old song"),
            ("oye la lluvia", "hears the rain"),
        ),
    ),
}
# Of the German ones, how many stand in for each file, one after the other.
COUNTS = {"train": 480, "withheld": 240, "dev": 120, "crawl": 120, "judged": 120, "comparable": 120, "test": 120}
Triple = tuple[str, str, str]


def phrases() -> list[tuple[str, str]]:
    """Return all pairs of German and English sentences, each once, always in the same order."""
    return [
        (f"{who} {does}{when}.", f"{who_en} {does_en}{when_en}.")
        for (who, who_en), (does, does_en), (when, when_en) in product(_WHO, _DOES, _WHEN)
    ]


def foreign() -> list[Triple]:
    """Return sentences of other languages, their translations and the languages."""
    return [
        (f"{who} {does}.", f"{who_en} {does_en}.", language)
        for language, (subjects, verbs) in _FOREIGN.items()
        for (who, who_en), (does, does_en) in product(subjects, verbs)
    ]


def stand_ins(name: str) -> list[Triple]:
    """Return what stands in for a file: German (or other), English, and what is said about the pair.

    No German sentence is in two files. A third of the targets of the crawl and of the judged pairs are exchanged, and
    all of the comparable ones.
    """
    if name == "wrong_language":
        return foreign()
    everything = phrases()
    mixed = np.random.default_rng(0).permutation(len(everything))
    end = dict(zip(COUNTS, accumulate(COUNTS.values()), strict=True))[name]
    count = COUNTS[name]
    german, english = zip(*(everything[row] for row in mixed[end - count : end]), strict=True)
    wrong = {"crawl": count // 3, "judged": count // 3, "comparable": count}.get(name, 0)
    english = (*english[1:wrong], *english[: min(wrong, 1)], *english[wrong:])
    said = [""] * count
    if name == "judged":
        said = ["A"] * wrong + ["V"] * (count - wrong)
    if name == "test":
        said = ["newstest2016"] * (count // 2) + ["multi30k-test_2016_flickr"] * (count - count // 2)
    if name in ("train", "withheld"):
        said = ["tatoeba"] * (count // 2) + ["multi30k-train"] * (count - count // 2)
    return list(zip(german, english, said, strict=True))
