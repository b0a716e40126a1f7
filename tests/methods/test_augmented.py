"""The loss under random changes: what is changed, that only row and seed decide how, and what it sees."""

import numpy as np
import torch
from torch import nn

import eigentrace as et
from eigentrace.errors import InputError, UnsupportedError
from tests.helpers.expecting import refused


def pictures(count=12, side=9):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 2, side, side, generator=generator), torch.arange(count) % 3


def network(side=9):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * (side - 2) ** 2, 3)).eval()


def moved(image, flip, down, right, pixels):
    """Do to one picture by loops what is done to all by indices."""
    image = image.flip(-1) if flip else image
    out = torch.zeros_like(image)
    height, width = image.shape[-2:]
    for i in range(height):
        for j in range(width):
            y, x = i + down - pixels, j + right - pixels
            if 0 <= y < height and 0 <= x < width:
                out[:, i, j] = image[:, y, x]
    return out


def test_every_picture_is_one_of_the_possible_ones():
    images, labels = pictures()
    changed, same = et.FlipsAndShifts(pixels=1)((images, labels), np.arange(12), 5)
    assert same is labels
    for image, found in zip(images, changed, strict=True):
        possible = [moved(image, f, d, r, 1) for f in (0, 1) for d in range(3) for r in range(3)]
        assert sum(torch.equal(found, one) for one in possible) == 1


def test_changes_are_even():
    images = torch.zeros(40_000, 1, 3, 3)
    images[:, :, 1, 0] = 1.0  # left of the middle
    changed = et.FlipsAndShifts(pixels=1)((images,), np.arange(40_000), 0)[0].mean(dim=(0, 1))
    # Left or right with even chances, then a third of all shifts each way; half of those sideways leave the picture.
    assert torch.allclose(changed, torch.tensor([1 / 18, 1 / 9, 1 / 18]).expand(3, 3), atol=5e-3)


def test_row_and_seed_decide_and_the_batch_does_not():
    data = pictures()
    task = et.classification(network())
    method = et.AugmentedLoss(draws=4, seed=3)
    whole = method.fit(task, data).self_influence([data])
    parts = [tuple(t[i : i + 5] for t in data) for i in range(0, 12, 5)]
    assert torch.allclose(whole, method.fit(task, parts).self_influence(parts), rtol=1e-5)
    assert torch.equal(whole, method.fit(task, data).self_influence([data]))
    other = et.AugmentedLoss(draws=4, seed=4).fit(task, data).self_influence([data])
    assert not torch.allclose(whole, other)


def test_it_is_the_mean_of_the_losses():
    data, model = pictures(), network()
    changes = et.FlipsAndShifts(flip=False, pixels=2)
    found = et.AugmentedLoss(changes, draws=3, seed=2).fit(et.classification(model), data).self_influence([data])
    with torch.no_grad():
        each = [
            nn.functional.cross_entropy(model(changes(data, np.arange(12), 6 + draw)[0]), data[1], reduction="none")
            for draw in range(3)
        ]
    assert torch.allclose(found, torch.stack(each).mean(dim=0), rtol=1e-5)


def test_no_change_is_the_loss():
    data, task = pictures(), et.classification(network())
    plain = et.Loss().fit(task, data).self_influence([data])
    still = et.AugmentedLoss(et.FlipsAndShifts(flip=False, pixels=0), draws=2)
    assert torch.allclose(still.fit(task, data).self_influence([data]), plain, rtol=1e-6)
    assert torch.equal(
        et.AugmentedLoss(lambda batch, rows, seed: batch, 1).fit(task, data).self_influence([data]), plain
    )


def test_what_it_refuses():
    data, task = pictures(), et.classification(network())
    with refused(InputError, "draws", 1, 0):
        et.AugmentedLoss(draws=0)
    with refused(InputError, "pixels", 0, -1):
        et.FlipsAndShifts(pixels=-1)
    with refused(InputError, "augment", "batch", "rows", "seed", "str"):
        et.AugmentedLoss("flips")
    flat = (torch.randn(6, 4), torch.arange(6) % 3)
    with refused(InputError, "(B, C, H, W)", "torch.float32 (6, 4)", "AugmentedLoss(augment=...)"):
        et.AugmentedLoss().fit(et.classification(nn.Linear(4, 3)), flat)
    fitted = et.AugmentedLoss(draws=1).fit(task, data)
    with refused(UnsupportedError, "AugmentedLoss", "pairs"):
        fitted.influence([data], [data])
    with refused(UnsupportedError, "AugmentedLoss", "normalize='gradient'"):
        fitted.self_influence([data], normalize="gradient")
