"""The generated images: determinism, statistics, classes, and what an interruption leaves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from examples import natural_images
from examples.natural_images import OPPONENT_AXES, Look, Specification, generate, prototype, render, variation
from tests.later import Later

discriminant_analysis, datasets = Later("sklearn.discriminant_analysis"), Later("torchvision.datasets")
SMALL = Specification(classes=2, train=4, val=2, seed=3)


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def times_of(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.glob("*/*/*.jpg")}


def spectral_slope(pixels: np.ndarray) -> float:
    """The exponent with which the luminance's amplitude falls, fitted over 4 octaves."""
    luminance = pixels.mean(axis=2)
    height, width = luminance.shape
    window = np.hanning(height)[:, None] * np.hanning(width)
    power = np.abs(np.fft.fft2((luminance - luminance.mean()) * window)) ** 2
    radius = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))
    edges = np.geomspace(4 / height, 0.35, 16)
    ring = np.digitize(radius, edges)
    amplitude = [np.sqrt(power[ring == number].mean()) for number in range(1, len(edges))]
    return -float(np.polyfit(np.log(edges[1:] * edges[:-1]) / 2, np.log(amplitude), 1)[0])


def traits(crop: np.ndarray) -> list[float]:
    """Figures that a first layer of a network can see: the mean cast, and the strength of both gradients."""
    luminance = crop.mean(axis=2)
    down, across = (np.abs(np.diff(luminance, axis=axis)).mean() for axis in (0, 1))
    cast = OPPONENT_AXES[1:] @ crop.mean(axis=(0, 1))
    return [float(np.log(down / across)), float(np.log(down + across)), *map(float, cast)]


def test_same_specification_gives_same_bytes(tmp_path: Path) -> None:
    assert generate(tmp_path / "one", SMALL, processes=1, progress=False)
    assert generate(tmp_path / "two", SMALL, processes=2, progress=False)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_another_seed_gives_other_images(tmp_path: Path) -> None:
    for seed in (0, 1):
        specification = Specification(classes=2, train=2, val=2, seed=seed)
        generate(tmp_path / str(seed), specification, processes=1, progress=False)
    first, second = (files_of(tmp_path / str(seed)) for seed in (0, 1))
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in first)


def test_an_image_depends_on_its_own_place_only(tmp_path: Path) -> None:
    generate(tmp_path / "few", Specification(classes=2, train=2, val=2), processes=1, progress=False)
    generate(tmp_path / "more", Specification(classes=2, train=6, val=2), processes=1, progress=False)
    few, more = files_of(tmp_path / "few"), files_of(tmp_path / "more")
    assert all(more[name] == few[name] for name in few if name.endswith(".jpg"))


def test_it_is_an_image_folder_with_equal_classes(tmp_path: Path) -> None:
    generate(tmp_path / "data", Specification(classes=3, train=6, val=3), processes=1, progress=False)
    for split, each in (("train", 2), ("val", 1)):
        folder = datasets.ImageFolder(tmp_path / "data" / split)
        assert folder.classes == ["class_00", "class_01", "class_02"]
        assert [folder.targets.count(label) for label in range(3)] == [each] * 3
        assert folder[0][0].mode == "RGB"


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    assert generate(tmp_path / "data", SMALL, processes=1, progress=False)
    before = times_of(tmp_path / "data")
    assert not generate(tmp_path / "data", SMALL, processes=1, progress=False)
    assert times_of(tmp_path / "data") == before


def test_a_folder_of_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("years of work")
    with pytest.raises(natural_images.DirectoryInUseError, match="holds other files"):
        generate(tmp_path / "data", SMALL, processes=1, progress=False)
    assert files_of(tmp_path) == {"data/thesis.txt": b"years of work"}


def test_a_folder_of_another_specification_is_refused(tmp_path: Path) -> None:
    generate(tmp_path / "data", SMALL, processes=1, progress=False)
    with pytest.raises(natural_images.DirectoryInUseError, match=r"'seed': 3.*'seed': 4"):
        generate(tmp_path / "data", Specification(classes=2, train=4, val=2, seed=4), processes=1, progress=False)


def test_a_partial_folder_of_another_specification_is_redone(tmp_path: Path) -> None:
    generate(tmp_path / "data", SMALL, processes=1, progress=False)
    wanted = files_of(tmp_path / "data")
    other = natural_images.partial_directory(tmp_path / "again")
    generate(other, Specification(classes=4, train=8, val=4), processes=1, progress=False)
    assert generate(tmp_path / "again", SMALL, processes=1, progress=False)
    assert files_of(tmp_path / "again") == wanted
    assert not other.exists()


def test_a_killed_run_is_taken_up_and_leaves_no_process(tmp_path: Path, eventually) -> None:
    specification = Specification(classes=2, train=40, val=2, seed=5)
    command = [sys.executable, "-m", "examples.natural_images", str(tmp_path / "data")]
    command += ["--classes=2", "--train=40", "--val=2", "--seed=5", "--processes=2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    partial = natural_images.partial_directory(tmp_path / "data")
    eventually(lambda: len(list(partial.glob("*/*/*.jpg"))) >= 3, what="three finished images")
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    eventually(lambda: not any(child.is_running() for child in children), what="the end of the pool")
    assert not (tmp_path / "data").exists()
    finished = times_of(partial)
    assert len(finished) < 42

    assert generate(tmp_path / "data", specification, processes=1, progress=False)
    assert len(list((tmp_path / "data").glob("*/*/*"))) == 42
    assert finished.items() <= times_of(tmp_path / "data").items()
    assert not partial.exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"classes": 1}, "classes=1"),
        ({"train": 3}, "train=3"),
        ({"val": 0}, "val=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_wrong_specification_says_what_is_wrong(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Specification(**wrong)


def test_spectra_fall_as_the_look_says() -> None:
    for slope in (0.8, 1.0, 1.3):
        look = Look(orientation=0.3, slope=slope, hue=0)
        measured = [spectral_slope(render(look, 500, 375, np.random.default_rng(seed))) for seed in range(4)]
        assert np.mean(measured) == pytest.approx(slope, abs=0.08)


def test_sizes_and_colours_are_those_of_photographs(tmp_path: Path) -> None:
    generate(tmp_path / "data", Specification(classes=4, train=20, val=4), progress=False)
    paths = list((tmp_path / "data").glob("*/*/*.jpg"))
    images = [np.asarray(Image.open(path)) for path in paths]
    assert 80_000 < np.mean([path.stat().st_size for path in paths]) < 140_000
    assert {image.shape for image in images} <= {(375, 500, 3), (333, 500, 3), (500, 375, 3)}
    assert 0.9 < np.mean([spectral_slope(image) for image in images]) < 1.1
    channels = np.mean([np.corrcoef(image.reshape(-1, 3).T) for image in images], axis=0)
    assert channels[~np.eye(3, dtype=bool)].min() > 0.85
    assert np.mean([((image == 0) | (image == 255)).mean() for image in images]) < 0.02


@pytest.mark.slow
def test_classes_can_be_learnt_from_flipped_crops_but_overlap() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(240) % 4
    seen = []
    for label in labels:
        image = render(variation(prototype(int(label), 4), rng), 250, 188, rng) / 255
        top, left = rng.integers(0, 188 - 112), rng.integers(0, 250 - 112)
        crop = image[top : top + 112, left : left + 112]
        seen.append(traits(crop[:, ::-1] if rng.random() < 0.5 else crop))
    learner = discriminant_analysis.LinearDiscriminantAnalysis().fit(seen[:160], labels[:160])
    accuracy = learner.score(seen[160:], labels[160:])
    assert 0.6 < accuracy < 0.99
