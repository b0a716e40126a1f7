"""The text of the demo's report: title, key figures and explanations of the terms."""

from collections.abc import Sequence

import numpy as np

from eigentrace.demo.experiment import Trained
from eigentrace.demo.report import Example, Fact, MethodRow, Note, Report

NUM_EXAMPLES = 25

_NOTES = (
    Note(
        "Self-influence",
        "I(x, x) = g(x)ᵀ H⁻¹ g(x), with g(x) the gradient of the loss of training example x and H the "
        "curvature of the mean training loss. Divided by the number of training examples, it predicts by how "
        "much the loss at x would rise, in nats, if x were left out of training. It is high for an example "
        "that the network has memorised instead of learning it from similar ones, such as an example with a "
        "wrong label or an unusual image.",
    ),
    Note(
        "Sign",
        "For two examples, a positive I(x, z) means that x is a proponent of z: without x, the loss at z would "
        "rise. A negative one means that x is an opponent. Self-influence is positive if all eigenvalues are; "
        "a direction with a negative eigenvalue lowers it.",
    ),
    Note(
        "AUC and AP",
        "AUC is the probability that a random example with a wrong label scores higher than a random one with "
        "a right label. AP (average precision) depends more on the top of the ranking. A random ranking has "
        "an AUC of 50% and, in this experiment, an AP of 20%.",
    ),
    Note(
        "Truncated and tail",
        "Both use the same Arnoldi fit and the same K eigenvectors. Truncated ignores all other directions of "
        "the gradient, as the original method does. Tail includes them, with the smallest kept eigenvalue as "
        "the curvature of each.",
    ),
    Note(
        "TracIn, RandProj, RandSelect",
        "Gradient similarity without curvature. TracIn uses whole gradients, averaged over three checkpoints; "
        "RandProj projects them on K random directions; RandSelect uses K randomly selected components.",
    ),
    Note(
        "Loss",
        "The loss of each example, without gradients. For randomly changed labels that the network has not "
        "memorised, it is hard to beat. It shows that an example is unusual, but unlike influence it cannot "
        "show which predictions the example affects.",
    ),
    Note(
        "Seconds",
        "Wall-clock time on the machine that wrote this page. Fitting is done once; scoring takes a pass over "
        "the training examples. Both Arnoldi methods share one fit.",
    ),
)


def make_report(
    trained: Trained,
    methods: Sequence[MethodRow],
    scores: np.ndarray,  # (N,)
    eigenvalues: np.ndarray,  # (K,)
    residuals: np.ndarray | None,  # (K,)
) -> Report:
    """Assemble the report of a demo; `scores` are those of the last method."""
    examples = _top_examples(trained, scores)
    num_found, num_wrong = sum(e.is_wrong for e in examples), int(trained.is_wrong.sum())
    size = len(trained.labels)
    return Report(
        title="Which labels are wrong?",
        lede=(
            f"A convolutional network was trained on {size:,} handwritten digits, after {num_wrong:,} of "
            "their labels had been changed to another digit. Each method below ranks the training images "
            "using only the trained network and its training labels. Wrong labels should come first."
        ),
        facts=(
            Fact(f"{num_found} of {len(examples)}", "top-ranked images have a wrong label"),
            Fact(f"{methods[-1].auc:.1f}%", f"AUC of {methods[-1].method}"),
            Fact(f"{trained.accuracy.test_true:.1f}%", "of test digits classified correctly"),
            Fact(f"{trained.num_parameters:,}", "parameters, all of them used"),
        ),
        methods=methods,
        eigenvalues=eigenvalues,
        residuals=residuals,
        scores=scores,
        is_wrong=trained.is_wrong.numpy(),
        examples=examples,
        notes=_NOTES,
    )


def _top_examples(trained: Trained, scores: np.ndarray) -> list[Example]:
    # A stable sort of the negated scores keeps ties in the order of the data.
    top = np.argsort(-scores, kind="stable")[:NUM_EXAMPLES]
    return [
        Example(
            row=int(row),
            image=(trained.images[row, 0] * 255).round().byte().numpy(),
            given=int(trained.labels[row]),
            true=int(trained.true_labels[row]),
            score=float(scores[row]),
        )
        for row in top
    ]
