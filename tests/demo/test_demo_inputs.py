import io

import numpy as np
import pytest
import torch

from eigentrace.demo.digits import load_digits
from eigentrace.demo.inputs import new_digits
from eigentrace.errors import InputError
from eigentrace.rendering.png import encode_png
from tests.helpers.expecting import refused

PIL_Image = pytest.importorskip("PIL.Image")


def grey(row):
    return (load_digits().train_images[row, 0] * 255).round().byte().numpy()


def read(image, label=3):
    images, labels = new_digits([{"image": image, "label": label}]).first(1).values
    assert images.shape == (1, 1, 28, 28)
    assert labels.tolist() == [int(label)]
    return images[0, 0]


def file_of(image, kind):
    stored = io.BytesIO()
    PIL_Image.fromarray(image).save(stored, format=kind)
    return stored.getvalue()


def test_a_digit_of_the_data_comes_back_as_it_is():
    expected = load_digits().train_images[4, 0]
    assert torch.equal(read(grey(4)), expected)
    assert torch.equal(read(encode_png(grey(4))), expected)
    assert torch.allclose(read(np.repeat(grey(4)[..., None], 3, axis=2)), expected)


def test_dark_on_light_is_turned_round():
    assert torch.allclose(read(255 - grey(4)), load_digits().train_images[4, 0], atol=1e-6)


@pytest.mark.parametrize("shape", [(280, 280), (14, 14), (1, 1)])
def test_other_sizes(shape):
    image = np.asarray(PIL_Image.fromarray(grey(4)).resize(shape[::-1]))
    found = read(image)
    assert 0 <= found.min() <= found.max() <= 1
    if shape != (1, 1):
        distances = (load_digits().train_images[:500, 0] - found).square().sum(dim=(1, 2))
        assert int(distances.argmin()) == 4


def test_what_is_not_square_lies_in_the_middle():
    stripe = np.full((56, 20), 255, np.uint8)
    stripe[0] = stripe[-1] = stripe[:, 0] = stripe[:, -1] = 0
    found = read(stripe)
    assert found[14, 12:16].min() > 0.9
    assert found[:, :8].max() == found[:, 20:].max() == 0


def test_the_label_is_a_digit():
    assert read(grey(0), "7") is not None
    for label in (10, -1, "x"):
        with refused(InputError, repr(label), 0, 9):
            new_digits([{"image": grey(0), "label": label}])


def test_files_that_are_no_images():
    with refused(InputError, "PNG", "JPEG", "WebP"):
        read(file_of(grey(0), "gif"))
