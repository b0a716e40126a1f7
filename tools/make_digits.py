"""Create `src/eigentrace/demo/digits.npz`, the digits that the demo trains on, from a full copy of MNIST.

    python tools/make_digits.py --mnist PATH/TO/mnist.npz

The source holds x_train (60000, 28, 28), y_train, x_test (10000, 28, 28) and y_test, all uint8 in the
original order. The output is the same, byte for byte, on every run.
"""

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np

OUT = Path(__file__).parents[1] / "src" / "eigentrace" / "demo" / "digits.npz"
NUM_TRAIN, NUM_TEST = 6000, 1000
# A fixed date of the zip members makes the output reproducible.
DATE = (2020, 1, 1, 0, 0, 0)


def subsample(mnist: Path) -> dict[str, np.ndarray]:
    """Draw the demo's subset of MNIST: a tenth of the training and test images, without replacement."""
    with np.load(mnist) as full:
        train = np.random.default_rng(0).permutation(60000)[:NUM_TRAIN]
        test = np.random.default_rng(0).permutation(10000)[:NUM_TEST]
        return {
            "x_train": full["x_train"][train],
            "y_train": full["y_train"][train],
            "x_test": full["x_test"][test],
            "y_test": full["y_test"][test],
        }


def write(arrays: dict[str, np.ndarray], out: Path) -> None:
    """Write an npz whose members use zip's LZMA method.

    LZMA on the plain pixels takes 0.98 MB, bzip2 0.99 and deflate 1.15. Storing differences of neighbouring pixels or
    a separate mask of nonzero pixels saves 3% at most and would need a decoder.
    """
    with zipfile.ZipFile(out, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, np.ascontiguousarray(array, dtype=np.uint8), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", DATE), member.getvalue(), zipfile.ZIP_LZMA)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, required=True, help="an npz with all of MNIST")
    write(subsample(parser.parse_args().mnist), OUT)
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")
