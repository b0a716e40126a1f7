"""The demo's results as a report, with the words to read it by."""

from collections.abc import Sequence

import numpy as np

from eigentrace.demo.experiment import Trained
from eigentrace.demo.report import Example, Fact, MethodRow, Note, Report

NUM_EXAMPLES = 25

_NOTES = (
    Note(
        "Self-influence",
        "I(x, x) = g(x)ᵀ H⁻¹ g(x), with g(x) the gradient of the loss of training example x and H the "
        "curvature of the mean training loss. Divided by the number of training examples it predicts how "
        "much the loss at x would rise, in nats, were x left out of training. High: the network knows this "
        "example by heart rather than from others like it, as it must with a wrong label or an unusual "
        "image.",
    ),
    Note(
        "Sign",
        "Between two examples, a positive I(x, z) makes x a proponent of z: without x, the loss at z would "
        "rise. A negative one makes it an opponent. Self-influence is positive wherever the curvature is; "
        "along a direction with a negative eigenvalue it counts against.",
    ),
    Note(
        "AUC and AP",
        "AUC is the chance that a random wrong label scores above a random right one. AP is the precision "
        "averaged over the ranking, and stricter at its top. A ranking by chance has 50 and, here, 20.",
    ),
    Note(
        "Truncated and tail",
        "Both come from one Arnoldi fit and the same K eigenvectors. Truncated drops all other directions "
        "of the gradient, as the original method does. Tail keeps them, with the smallest kept eigenvalue "
        "as their common curvature.",
    ),
    Note(
        "TracIn, RandProj, RandSelect",
        "Gradient similarity without curvature: the whole gradient, averaged over three moments of training; "
        "its projection on K random directions; K of its coordinates picked at random.",
    ),
    Note(
        "Loss",
        "The loss of each example, no gradients at all. With labels changed at random and a network that "
        "has not learnt them by heart, it is hard to beat. It says that an example is odd, and cannot say "
        "which predictions the example is responsible for; influence can.",
    ),
    Note(
        "Seconds",
        "Wall-clock time on the machine that made this page. Fitting happens once; scoring reads every "
        "training example. Both Arnoldi rows share one fit.",
    ),
)


def make_report(
    trained: Trained,
    methods: Sequence[MethodRow],
    scores: np.ndarray,  # (N,)
    eigenvalues: np.ndarray,  # (K,)
    residuals: np.ndarray | None,  # (K,)
) -> Report:
    """Put together what the page of a demo shows; `scores` are those of the last method."""
    examples = _top_examples(trained, scores)
    num_found, num_wrong = sum(e.is_wrong for e in examples), int(trained.is_wrong.sum())
    size = len(trained.labels)
    return Report(
        title="Which labels are wrong?",
        lede=(
            f"A convolutional network was trained on {size:,} handwritten digits, after {num_wrong:,} of "
            "their labels had been changed to another digit. Each method below ranks the training images "
            "using the trained network and the labels it was given, nothing else. Wrong labels should come "
            "first."
        ),
        facts=(
            Fact(f"{num_found} of {len(examples)}", "images at the top have a wrong label"),
            Fact(f"{methods[-1].auc:.1f}%", f"AUC of {methods[-1].method}"),
            Fact(f"{trained.accuracy.test_true:.1f}%", "of new digits classified correctly"),
            Fact(f"{trained.num_parameters:,}", "parameters, all attributed"),
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
    # A stable sort of the negated scores keeps equal ones in the order of the data.
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
