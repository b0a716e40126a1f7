"""Columns in memory, from which decisions can be made as from a run."""

import numpy as np


class Columns:
    def __init__(self, ids=None, **columns):
        self._columns = {name: np.asarray(values) for name, values in columns.items()}
        self.columns, self.ids = tuple(columns), ids
        self.num_rows = len(next(iter(self._columns.values())))

    def put(self, name, values):
        """Replace a column, or add one, by values of any kind."""
        self._columns[name] = values

    def column(self, name):
        return self._columns[name]


def noisy(size=60, seed=0, classes=3):
    """Scores with ties, labels, and predictions that mostly agree with them."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, size)
    predictions = np.where(draw.random(size) < 0.3, draw.integers(0, classes, size), labels)
    return Columns(
        ids=np.array([f"row-{i}" for i in range(size)]),
        self_influence=draw.integers(0, size // 3, size) / 2,
        loss=draw.random(size),
        label=labels,
        prediction=predictions,
        source=draw.choice(np.array(["web", "books", "mail"]), size),
    )
