"""What examples look like to people: texts as they are, images as pixels, and nothing for what is neither."""

import io
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import eigentrace as et
from eigentrace.errors import InputError
from eigentrace.rendering import Custom, Images, Pairs, Shown, Tensors, Texts, as_shown
from eigentrace.rendering.png import Scale, as_png, encode_png
from tests.helpers.expecting import refused
from tests.helpers.small import table

PIL_Image = pytest.importorskip("PIL.Image")


def decoded(png):
    with PIL_Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        image.load()
        return np.asarray(image)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# PNG files


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from([(), (1,), (3,), (4,)]))
def test_pixels_survive(height, width, channels):
    image = noise(height, width, *channels)
    np.testing.assert_array_equal(decoded(encode_png(image)), image[..., 0] if channels == (1,) else image)


@pytest.mark.parametrize(
    "image", [np.zeros((2, 2)), np.zeros((2, 2, 2), np.uint8), np.zeros((0, 2), np.uint8), np.zeros(4, np.uint8)]
)
def test_what_is_no_image_is_refused(image):
    with refused(InputError, "(height, width)", "uint8", image.dtype, image.shape):
        encode_png(image)


IMAGE = noise(6, 5, 3)
FORMS = {
    "array": (IMAGE,),
    "array of shares": (IMAGE / 255,),
    "array with its channels in front": (IMAGE.transpose(2, 0, 1),),
    "tensor": (torch.from_numpy(IMAGE).permute(2, 0, 1),),
    "tensor with its channels behind": (torch.from_numpy(IMAGE),),
    "tensor of shares": (torch.from_numpy(IMAGE).permute(2, 0, 1) / 255,),
    "Pillow": (PIL_Image.fromarray(IMAGE),),
    "PNG": (encode_png(IMAGE),),
}


@pytest.mark.parametrize("image", table(FORMS))
def test_every_form_of_an_image(image):
    np.testing.assert_array_equal(decoded(as_png(image)), IMAGE)


def test_bfloat16_and_other_modes_of_pillow():
    half = (torch.arange(16.0) / 16).reshape(4, 4)
    np.testing.assert_array_equal(decoded(as_png(half.bfloat16())), (half * 255).round().byte().numpy())
    assert decoded(as_png(PIL_Image.fromarray(IMAGE).convert("CMYK"))).shape == (6, 5, 3)


@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy, PIL_Image.fromarray])
def test_large_images_become_smaller(form):
    image = np.zeros((1100, 600), np.uint8)
    image[:550] = 200
    found = decoded(as_png(form(image)))
    assert max(found.shape) <= 512
    assert found.shape[0] / found.shape[1] == pytest.approx(1100 / 600, rel=0.02)
    assert (found[0] == 200).all()
    assert (found[-1] == 0).all()


def test_a_pillow_image_is_left_as_it_was():
    image = PIL_Image.fromarray(noise(600, 600))
    as_png(image)
    assert image.size == (600, 600)


def test_black_and_white():
    assert Scale.of(np.array([0.0, 0.2])) == Scale(0, 1)
    assert Scale.of(np.array([0.0, 17.0])) == Scale(0, 255)
    assert Scale.of(np.array([0, 1])) == Scale(0, 1)
    assert Scale.of(np.array([0, 1], np.uint8)) == Scale(0, 255)
    assert Scale.of(np.array([-2.0, 3.0, np.nan, np.inf])) == Scale(-2, 3)
    assert Scale.of(np.array([np.nan])) == Scale(0, 1)
    values = np.array([-2.0, 0.5, 3.0, np.nan, np.inf, -np.inf, 99])
    assert Scale(-2, 3)(values).tolist() == [0, 128, 255, 0, 255, 0, 255]
    assert Scale(5, 5)(np.array([5.0])).tolist() == [0]


WRONG_IMAGES = {
    "a vector": (np.zeros(4), ("(4,)",)),
    "five channels": (torch.zeros(5, 8, 8), ("channels", "(5, 8, 8)")),
    "another file": (b"GIF89a", ("PNG",)),
    "empty": (np.zeros((0, 3), np.uint8), ("uint8", "(0, 3)")),
}


@pytest.mark.parametrize(("image", "mentions"), table(WRONG_IMAGES))
def test_other_images_are_refused(image, mentions):
    with refused(InputError, *mentions):
        as_png(image)


# Texts

TEXTS = ["The Cat sat", None, "", "a dog.", "ÜBER (all) a\\b", "<b>cat</b>"]
TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


def columns(kind=TYPES[0]):
    """The texts in three chunks, one of them empty."""
    parts = [pa.array(part, pa.string()).cast(kind) for part in (TEXTS[:2], [], TEXTS[2:])]
    return pa.table({"words": pa.chunked_array(parts, kind), "year": list(range(6))})


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_texts_of_every_type(kind):
    show = Texts(columns(kind), "words", classes=["no", "yes"])
    assert (show.kind, len(show), show.classes) == ("text", 6, ("no", "yes"))
    assert [shown.text for shown in show([5, 0, 1, 5])] == ["<b>cat</b>", "The Cat sat", "", "<b>cat</b>"]
    assert show([]) == []
    assert show.search("CAT").tolist() == [True, False, False, False, False, True]
    assert show.search("über").tolist() == [False] * 4 + [True, False]
    assert show.search("").all()


@pytest.mark.parametrize("words", [".", "(all)", "a\\b", "[", "*", "<B>"])
def test_words_are_no_pattern(words):
    expected = [text is not None and words.lower() in text.lower() for text in TEXTS]
    assert Texts(columns(), "words").search(words).tolist() == expected


letters = st.text("aAbB.*(\\ß ", max_size=6)


@given(st.lists(letters, min_size=1, max_size=8), letters)
def test_search_finds_what_python_finds(texts, words):
    assert Texts(texts).search(words).tolist() == [words.lower() in text.lower() for text in texts]


def test_texts_from_lists_and_mappings():
    assert Texts(["a", "b"])([1])[0] == Shown("text", text="b")
    assert Texts({"body": ["a", "b"]}, "body")([0])[0].text == "a"
    assert Texts(columns(), "year")([3])[0].text == "3"
    assert Texts(columns(), "year").search("3").tolist() == [False] * 3 + [True] + [False] * 2


def test_pairs():
    show = Pairs({"text": ["Hello", "bye"], "target": ["Hallo", "Tschüss hello"]})
    assert (show.kind, len(show), show.classes) == ("pair", 2, None)
    assert show([1, 0]) == [Shown("pair", "bye", "Tschüss hello"), Shown("pair", "Hello", "Hallo")]
    assert show.search("hello").tolist() == [True, True]
    assert show.search("hallo").tolist() == [True, False]
    assert [shown.target for shown in Pairs({"a": ["x"]}, "a", "a")([0])] == ["x"]


@pytest.mark.parametrize("rows", [[6], [-1], [0, 10**12]])
def test_rows_that_are_not_there(rows):
    for show in (Texts(columns(), "words"), Images(lambda row: IMAGE, 6), Tensors(torch.rand(6, 4, 4))):
        with refused(InputError, rows[-1], 0, 5):
            show(rows)


def test_other_sources_are_refused():
    with refused(InputError, "'text'", "words, year"):
        Texts(columns())
    with refused(InputError, "pyarrow", "int"):
        Pairs(3)


# A function of the user's

RETURNED = {
    "text": ("text", "abc", Shown("text", text="abc")),
    "pair": ("pair", ("a", "b"), Shown("pair", text="a", target="b")),
    "tokens": (
        "tokens",
        ["a", ("b", 0.5), ("c", None)],
        Shown("tokens", tokens=(("a", None), ("b", 0.5), ("c", None))),
    ),
    "losses of numpy": ("tokens", [["b", np.float32(0.5)]], Shown("tokens", tokens=(("b", 0.5),))),
    "image": ("image", IMAGE, Shown("image", png=encode_png(IMAGE))),
    "as it is": ("text", Shown("pair", text="a", target="b"), Shown("pair", text="a", target="b")),
}


@pytest.mark.parametrize(("kind", "value", "expected"), table(RETURNED))
def test_what_a_function_may_return(kind, value, expected):
    assert as_shown(value, kind) == expected
    show = Custom(lambda row: value, kind, 3, classes=range(2))
    assert show([2, 2]) == [expected] * 2
    assert (show.kind, len(show), show.classes) == (kind, 3, ("0", "1"))
    assert show.search("a") is None


WRONG_VALUES = {
    "number": ("text", 3, ("text", 3)),
    "three texts": ("pair", ("a", "b", "c"), ("pair", "('a', 'b', 'c')")),
    "one text": ("pair", "ab", ("pair", "'ab'")),
    "text of tokens": ("tokens", "ab", ("tokens", "'ab'")),
    "token with two losses": ("tokens", [("a", 1, 2)], ("token", "('a', 1, 2)")),
    "loss as text": ("tokens", [("a", "b")], ("token", "('a', 'b')")),
    "long": ("text", list(range(99)), ("text", "[0, 1,", "...")),
}


@pytest.mark.parametrize(("kind", "value", "mentions"), table(WRONG_VALUES))
def test_what_a_function_may_not_return(kind, value, mentions):
    with refused(InputError, *mentions) as caught:
        as_shown(value, kind)
    assert len(str(caught.value)) < 200  # however long the value is


def test_settings_of_a_function_are_checked():
    with refused(InputError, "kind", "image, text, pair, tokens", "'video'"):
        Custom(str, "video", 3)
    with refused(InputError, "length", 0):
        Custom(str, "text", 0)
    with refused(InputError, "pair", "target"):
        Shown("pair", text="a")
    with refused(InputError, "kind", "'video'"):
        Shown("video")


def test_a_search_of_the_users_own():
    texts = ["cat", "dog"]
    show = Custom(texts.__getitem__, "text", 2, search=lambda words: [words in text for text in texts])
    assert show.search("og").tolist() == [False, True]
    with refused(InputError, "search", 2, "int64", "(1,)"):
        Custom(str, "text", 2, search=lambda words: [1]).search("a")


def test_a_function_is_never_called_twice_at_once():
    inside, together = threading.Semaphore(1), []

    def function(row):
        together.append(not inside.acquire(blocking=False))
        threading.Event().wait(0.002)
        inside.release()
        return str(row)

    show = Custom(function, "text", 100)
    threads = [threading.Thread(target=show, args=([1, 2, 3],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [False] * 12


# Tensors

PIXELS = torch.from_numpy(noise(5, 3, 8, 7)).float() / 255
LABELS = torch.arange(5)
SEEN = {
    "tensor": (PIXELS,),
    "dataset": (TensorDataset(PIXELS, LABELS),),
    "loader": (DataLoader(TensorDataset(PIXELS, LABELS), batch_size=2),),
    "batches": ([(PIXELS[:2], LABELS[:2]), (PIXELS[2:], LABELS[2:])],),
    "labels first": ([{"labels": LABELS, "pixel_values": PIXELS}],),
}


@pytest.mark.parametrize("data", table(SEEN))
def test_images_that_a_network_sees(data):
    show = Tensors(data, classes=["a"])
    assert (show.kind, len(show), show.classes, show.search("a")) == ("image", 5, ("a",), None)
    for shown, row in zip(show([4, 0, 4]), (4, 0, 4), strict=True):
        np.testing.assert_array_equal(decoded(shown.png), (PIXELS[row].permute(1, 2, 0) * 255).round().byte().numpy())
    assert show([]) == []


def test_one_scale_for_all_images():
    dark, light = torch.full((8, 8), -1.0), torch.full((8, 8), 1.0)
    grey = torch.zeros(8, 8)
    found = [int(decoded(shown.png)[0, 0]) for shown in Tensors(torch.stack([dark, light, grey]))([0, 1, 2])]
    assert found == [0, 255, 128]


def test_images_of_different_sizes():
    sizes = [(1, 9, 8), (1, 4, 12)]
    data = et.Data([(torch.rand(size), 0) for size in sizes], batch_size=1)
    assert [decoded(shown.png).shape for shown in Tensors(data)([0, 1])] == [(9, 8), (4, 12)]


GUESSED = {
    "colour images": (PIXELS, True),
    "grey squares": (torch.rand(3, 8, 8), True),
    "vectors": (torch.rand(3, 8), False),
    "sequences of vectors": (torch.rand(3, 20, 8), False),
    "small squares": (torch.rand(3, 4, 4), False),
    "many channels": (torch.rand(3, 16, 8, 8), False),
}


@pytest.mark.parametrize(("tensor", "is_image"), table(GUESSED))
def test_what_is_taken_for_images(tensor, is_image):
    found = Tensors.found_in(et.Data(TensorDataset(tensor, torch.zeros(len(tensor)))))
    assert (found is not None) == is_image


def test_streams_are_left_alone():
    examples = list(zip(PIXELS, LABELS, strict=True))
    assert Tensors.found_in(et.Data(examples)) is not None
    assert Tensors.found_in(et.Data.stream(examples, length=5)) is None


def test_examples_without_an_image():
    with refused(InputError, "eigentrace.rendering.Custom"):
        Tensors(TensorDataset(torch.rand(3, 8), LABELS[:3]))


def test_images_from_a_function():
    show = Images(lambda row: np.full((2, 2), row, np.uint8), 4, classes=["x"])
    assert (show.kind, len(show), show.classes, show.search("a")) == ("image", 4, ("x",), None)
    assert [int(decoded(shown.png)[0, 0]) for shown in show([3, 1])] == [3, 1]
