"""Commands of experiments that cannot work are told so before anything is measured, and by which option."""

from argparse import ArgumentTypeError, Namespace
from importlib import import_module
from pathlib import Path

import pytest

from eigentrace.errors import InputError
from experiments.digits import mnist_large
from experiments.images import image_exemplars, scaling, vit_cifar
from experiments.paper import NAMES
from experiments.shared.frame import Experiment, Session, main
from experiments.shared.needed import Needed
from experiments.translation import mt_filter, mt_retrieval, throughput
from experiments.translation.parts.corpora import FILES
from harness.command import choices, positive
from harness.measure import reason
from tests.helpers.expecting import expect_mentions


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """Should one not be refused, its results do not go to this folder's docs."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


def refused(experiment: Experiment, capsys, *argv: str) -> str:
    """Return what is said when a command is refused, having written nothing to the screen but that."""
    with pytest.raises(SystemExit) as ended:
        main(experiment, argv)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "²", "1_0"])
def test_only_whole_numbers_of_at_least_one_are_counts(text):
    with pytest.raises(ArgumentTypeError) as caught:
        positive(text)
    expect_mentions(str(caught.value), [repr(text), 1])
    assert positive("12") == 12


@pytest.mark.parametrize("option", ["--seeds", "--workers", "--pairs", "--steps", "--product-batch"])
def test_counts_of_nothing_are_refused(option, capsys):
    expect_mentions(refused(throughput.EXPERIMENT, capsys, "--small", option, "-1"), [f"argument {option}", "'-1'", 1])


def test_a_list_of_nothing_is_refused(capsys):
    expect_mentions(refused(scaling.EXPERIMENT, capsys, "--small", "--parts", ","), ["argument --parts", "','"])
    assert choices("a", "b")("b,") == ["b"]


def toy(calls: list[str]) -> Experiment:
    def part(session: Session) -> None:
        calls.append("measured")

    return Experiment("toy", "A toy", "About it.", {"part": part}, lambda records: [])


@pytest.mark.parametrize("place", ["file", "file/folder"])
def test_a_place_that_cannot_be_written_to_is_told_first(tmp_path, place, capsys):
    (tmp_path / "file").write_text("in the way")
    calls: list[str] = []
    said = refused(toy(calls), capsys, "--out", str(tmp_path / place))
    expect_mentions(said, [f"--out {tmp_path / place}"])
    assert calls == []
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_folder_without_the_files_is_named_once_with_what_is_missing(tmp_path, capsys):
    said = refused(mt_filter.EXPERIMENT, capsys, "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    assert said.count("\n") == 1
    expect_mentions(said, [f"--data {tmp_path}", *FILES.values(), "docs/translation_data.md"])
    said = refused(mt_filter.EXPERIMENT, capsys, "--small", "--data", str(tmp_path / "nowhere"))
    expect_mentions(said, [f"--data {tmp_path / 'nowhere'}", "deen_train_clean.tsv.gz"])
    assert not list(tmp_path.iterdir())


def test_one_file_that_is_missing_is_enough(tmp_path, capsys):
    for file in FILES.values():
        (tmp_path / file).touch()
    (tmp_path / FILES["dev"]).unlink()
    said = refused(mt_retrieval.EXPERIMENT, capsys, "--data", str(tmp_path))
    expect_mentions(said, [f"--data {tmp_path}", FILES["dev"]])
    assert not any(file in said for name, file in FILES.items() if name != "dev")


def test_without_a_folder_its_files_are_named(capsys):
    said = refused(mt_retrieval.EXPERIMENT, capsys)
    expect_mentions(
        said, ["deen_train_clean.tsv.gz", "deen_dev.tsv.gz", "--data", "--small", "docs/translation_data.md"]
    )
    expect_mentions(refused(image_exemplars.EXPERIMENT, capsys), ["--data", "--download"])


def test_what_is_public_need_not_be_there_if_it_is_to_be_fetched(tmp_path, capsys):
    said = refused(vit_cifar.EXPERIMENT, capsys, "--data", str(tmp_path))
    expect_mentions(said, [f"--data {tmp_path}", "--download"])
    said = refused(vit_cifar.EXPERIMENT, capsys, "--data", str(tmp_path), "--download")
    expect_mentions(said, [f"--data {tmp_path}", "cifar10n_labels_00000_14999.npz", "--parts heldout,flipped"])
    expect_mentions(refused(mnist_large.EXPERIMENT, capsys, "--download"), ["--download", "--data"])


def checked(needed: Needed, *parts: str, data: Path | None = None, small: bool = False, download: bool = False) -> None:
    needed.check(Namespace(data=data, small=small, download=download, labels=["clean"]), parts, parts)


def test_what_is_there_or_embedded_is_not_asked_for(tmp_path):
    needed = {name: import_module(f"experiments.{name}").EXPERIMENT.needed for name in NAMES}
    for name in NAMES:
        checked(needed[name], "part", small=True)
    checked(needed["digits.mnist_large"], "losses")
    checked(needed["images.scaling"], "vit_l_32")
    (tmp_path / "mnist.npz").touch()
    checked(needed["digits.mnist_large"], "losses", data=tmp_path)
    (tmp_path / "cifar-10-python.tar.gz").touch()
    checked(vit_cifar.EXPERIMENT.needed, "heldout", data=tmp_path)
    checked(needed["images.resnet_curve"], "curve", data=tmp_path / "new", download=True)
    with pytest.raises(SystemExit):
        checked(needed["images.image_exemplars"], "photos", data=tmp_path)


def test_a_small_page_says_so_at_its_top_and_how_the_full_one_is_made(tmp_path):
    for experiment, full in ((mt_filter.EXPERIMENT, " --data FOLDER"), (mnist_large.EXPERIMENT, "")):
        assert main(experiment, ["--small", "--render", "--out", str(tmp_path)]) == 0
        top = (tmp_path / f"{experiment.name}_small.md").read_text().split(experiment.about)[0]
        assert "**Numbers of the small form**" in top
        assert f"At full size: `{experiment.command}{full}`." in top
        assert main(experiment, ["--render", "--out", str(tmp_path)]) == 0
        assert "small form" not in (tmp_path / f"{experiment.name}.md").read_text().split(experiment.about)[0]


def test_reasons_keep_what_to_do():
    remedy = "Put the file there."
    ours = reason(InputError("x " * 300 + remedy))
    assert ours.endswith(remedy)
    assert "…" not in ours
    other = reason(OSError("x " * 300 + remedy))
    assert other.endswith(remedy)
    assert len(other) == 300
