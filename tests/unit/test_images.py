"""Pictures as a person sees them, from folders that people and systems have written to."""

import io
import os
import shutil
import unicodedata

import numpy as np
import pytest
import torch

from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.config.schema.settings import VisionTask
from dsframe.data import as_source, folder
from dsframe.data.documents import find_files
from dsframe.data.vision import Images
from dsframe.errors import CheckpointError, DataError
from dsframe.run import execute
from dsframe.tasks import build
from dsframe.tools import evaluate

pytest.importorskip("PIL", reason="Pillow is not installed")
from PIL import ExifTags, Image, ImageOps

from tests.files import ds_config

FACTS = Images("pictures", 3, 32, 1, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 0, False)
RAMP = np.tile(np.linspace(0, 255, 32).astype(np.uint8), (32, 1))


def written(place, image, **options):
    place.parent.mkdir(parents=True, exist_ok=True)
    image.save(place, **options)
    return place


def transparent():
    black = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    black.putalpha(Image.fromarray(255 - RAMP))
    return black


FORMS = {
    "8 bits": (Image.fromarray(RAMP), "png"),
    "palette": (Image.fromarray(RAMP).convert("P"), "png"),
    "transparent": (transparent(), "png"),
    "ink": (Image.fromarray(RAMP).convert("RGB").convert("CMYK"), "tif"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_ramp_is_the_same_ramp(form, tmp_path):
    image, suffix = FORMS[form]
    place = written(tmp_path / f"a.{suffix}", image)
    with Image.open(place) as file:
        assert np.abs(np.asarray(folder.rgb(file), int) - RAMP[..., None]).max() <= 2


@pytest.mark.parametrize("turned", range(1, 9))
def test_a_camera_says_which_way_is_up(turned):
    exif = Image.Exif()
    exif[0x0112] = turned
    content = io.BytesIO()
    Image.fromarray(RAMP).convert("RGB").save(content, "jpeg", exif=exif, quality=95)
    with Image.open(content) as file:
        shown = np.asarray(ImageOps.exif_transpose(file), int)
        assert np.abs(np.asarray(folder.rgb(file), int) - shown).max() == 0


@pytest.mark.parametrize(
    ("image", "options", "words"),
    [
        (
            Image.new("RGB", (4, 4)),
            {"save_all": True, "append_images": [Image.new("RGB", (4, 4), "red")]},
            "2 pictures",
        ),
        (Image.fromarray(np.full((4, 4), 7, np.uint16)), {}, "mode I;16.; scale them"),
    ],
)
def test_what_has_no_one_look_is_refused(image, options, words, tmp_path):
    with Image.open(written(tmp_path / "a.tif", image, **options)) as file, pytest.raises(ValueError, match=words):
        folder.rgb(file)


def test_what_cameras_put_behind_a_picture_is_no_damage(tmp_path):
    picture = Image.fromarray(RAMP).convert("RGB")
    previews = written(tmp_path / "a.jpg", picture, format="MPO", save_all=True, append_images=[picture])
    film = written(tmp_path / "b.jpg", picture)
    film.write_bytes(film.read_bytes() + bytes(1 << 17))
    for place in (previews, film):
        assert not folder._damage(place)
        with Image.open(place) as file:
            assert np.abs(np.asarray(folder.rgb(file), int) - RAMP[..., None]).max() <= 3
    film.write_bytes(film.read_bytes()[:300])
    assert folder._damage(film)


def test_a_transparent_colour_of_a_palette_is_white():
    image = Image.new("P", (1, 1))
    image.info["transparency"] = 0
    assert folder.rgb(image).getpixel((0, 0)) == (255, 255, 255)


@pytest.fixture
def pictures(tmp_path):
    for name in ("cat", "dog"):
        for number in range(3):
            written(tmp_path / "train" / name / f"{number}.png", Image.fromarray(RAMP))
    return tmp_path


def read(place):
    found = folder.load(str(place), FACTS, train=True, augment=False)
    return [str(path.relative_to(place / "train")) for path, _ in found.samples]


def test_what_systems_leave_is_neither_class_nor_picture(pictures):
    before = read(pictures)
    for name in (".ipynb_checkpoints", "__MACOSX", "cat/.ipynb_checkpoints", "cat/@eaDir"):
        written(pictures / "train" / name / "9.png", Image.fromarray(RAMP))
    for name in ("cat/._0.png", "cat/.DS_Store", "dog/Thumbs.db"):
        (pictures / "train" / name).write_bytes(b"x")
    (pictures / "train" / "cat" / "8.png").mkdir()
    assert folder.class_names(str(pictures)) == ["cat", "dog"]
    assert read(pictures) == before


def test_folders_behind_links_are_read_once(pictures):
    before = read(pictures)
    written(pictures / "elsewhere" / "7.png", Image.fromarray(RAMP))
    (pictures / "train" / "cat" / "more").symlink_to(pictures / "elsewhere")
    (pictures / "train" / "cat" / "loop").symlink_to(pictures / "train")
    assert read(pictures) == sorted([*before, "cat/more/7.png"])


@pytest.mark.parametrize("places", [("train",), ("train", "val")])
def test_an_accent_is_the_same_letter_in_each_way_to_write_it(places, pictures):
    """Copied from macOS, a name has its accent as a character of its own."""
    for number, form in enumerate(("NFC", "NFD")):
        place = pictures / places[number % len(places)] / unicodedata.normalize(form, "café")
        written(place / "0.png", Image.fromarray(RAMP))
    if len(places) == 1:
        with pytest.raises(DataError, match=r"'caf\\xe9' and 'cafe\\u0301', one name written in two ways"):
            folder.class_names(str(pictures))
        return
    names = folder.class_names(str(pictures))
    assert names == [unicodedata.normalize("NFC", "café"), "cat", "dog"]
    assert [label for _, label in folder.load(str(pictures), FACTS, train=False, augment=False).samples] == [0]
    said = []
    folder.check(str(pictures), names, said.append)
    assert said == [f"no images of cat, dog in {pictures / 'val'}"]


def test_a_pipe_is_not_waited_for(pictures):
    os.mkfifo(pictures / "train" / "cat" / "9.png")
    with pytest.raises(DataError, match=r"9\.png \(it is not a file\)"):
        folder.check(str(pictures), ["cat", "dog"], print)
    os.mkfifo(pictures / "rows.jsonl")
    with pytest.raises(DataError, match="is neither a file nor a folder"):
        find_files(str(pictures / "rows.jsonl"), "task.data.train")


def test_a_class_without_pictures_is_refused(pictures):
    (pictures / "train" / "bird").mkdir()
    with pytest.raises(DataError, match="no images of bird"):
        read(pictures)


def test_damaged_files_are_named_all_at_once_before_training(pictures):
    said = []
    folder.check(str(pictures), ["cat", "dog"], said.append)
    cut = pictures / "train" / "cat" / "1.png"
    cut.write_bytes(cut.read_bytes()[:-20])
    (pictures / "train" / "dog" / "2.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"2 files cannot be read .*cat/1\.png .*dog/2\.png"):
        folder.check(str(pictures), ["cat", "dog"], said.append)
    assert not said


@pytest.mark.parametrize("kind", ["bmp", "tif", "gif", "jpg", "webp"])
def test_a_file_of_any_kind_that_is_cut_off_is_found_before_training(kind, tmp_path):
    """A thumbnail in a JPEG has the end of a picture, too."""
    thumbnail = io.BytesIO()
    Image.fromarray(RAMP).save(thumbnail, "JPEG")
    head = Image.Exif()
    head.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.MakerNote] = thumbnail.getvalue()
    noise = np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)
    place = written(tmp_path / f"a.{kind}", Image.fromarray(noise), **({"exif": head} if kind == "jpg" else {}))
    assert not folder._damage(place)
    place.write_bytes(place.read_bytes()[:-40])
    assert folder._damage(place)


def goes_on(pictures, steps, **more):
    """A run on these pictures until this step, from where it was."""
    section = {"name": "vision", "dataset": "image-folder", "data_dir": str(pictures), "image_size": 32, **more}
    file = ds_config(1, "SGD", 0.1, engine="single", steps=steps, task=section, run_dir=str(pictures / "run"))
    execute(load(file), resume="auto")


@pytest.mark.parametrize("more", [{}, {"samples": 5}])
def test_a_resume_says_that_a_picture_is_another_one_under_its_name(more, pictures, capsys):
    """Not where the folder was copied, which changes the times of its files."""
    shutil.copytree(pictures / "train", pictures / "val")
    goes_on(pictures, 1, **more)
    shutil.copytree(pictures / "train", pictures / "copy")
    shutil.rmtree(pictures / "train")
    (pictures / "copy").rename(pictures / "train")
    goes_on(pictures, 2, **more)
    assert "the training data" not in capsys.readouterr().err
    written(pictures / "train" / "cat" / "1.png", Image.fromarray(RAMP).resize((9, 9)))
    goes_on(pictures, 3, **more)
    assert "the training data: sample (which one is unknown) was another one" in capsys.readouterr().err


def test_a_checkpoint_is_of_the_classes_that_it_was_trained_with(pictures):
    """A folder that was renamed, or is gone, is said before an evaluation and before a resume."""
    shutil.copytree(pictures / "train", pictures / "val")
    goes_on(pictures, 1)
    for name in ("train", "val"):
        (pictures / name / "dog").rename(pictures / name / "ant")
    said = "the data's classes are ant, cat, but the checkpoint was trained with cat, dog; dog missing; ant new"
    with pytest.raises(CheckpointError, match=said):
        goes_on(pictures, 2)
    with pytest.raises(CheckpointError, match=said):
        evaluate._run("evaluate", evaluate._options("evaluate", [str(pictures / "run")]), World())


def test_classes_are_numbered_by_name(tmp_path):
    """Not as the system lists the folders."""
    names = [f"class {number}" for number in (10, 9, 2, 31, 4, 25, 6, 17, 8, 11)]
    for name in names:
        written(tmp_path / "train" / name / "1.PNG", Image.fromarray(RAMP))
    assert folder.class_names(str(tmp_path)) == sorted(names)
    data = folder.load(str(tmp_path), FACTS, train=True, augment=False)
    assert [path.parent.name for path, _ in data.samples] == sorted(names)
    assert [label for _, label in data.samples] == [*range(10)]
    given = folder.load(str(tmp_path), FACTS, train=True, augment=False, names=names)
    assert [(label, path.parent.name) for path, label in given.samples] == [*enumerate(names)]


def test_an_evaluation_takes_pictures_as_they_are(pictures):
    """Training draws a part of each picture and its mirror image; an evaluation has the centre of those held out."""
    written(pictures / "val" / "cat" / "9.png", Image.fromarray(RAMP).resize((48, 40)))
    section = {"dataset": "image-folder", "data_dir": str(pictures), "image_size": 32}
    task = build(VisionTask.model_validate(section), seed=1)
    held_out = as_source(task.eval_data(), 1)
    assert [path.name for path, _ in held_out.dataset.samples] == ["9.png"]
    first, again = (held_out.batch(torch.tensor([0]), epoch)[0] for epoch in (0, 1))
    with Image.open(pictures / "val" / "cat" / "9.png") as file:
        expected = folder._transform(task.images, augment=False)(folder.rgb(file))
    assert torch.equal(first[0], expected)
    assert torch.equal(first, again)
    trained = as_source(task.train_data(), 1)
    assert not torch.equal(*(trained.batch(torch.tensor([0]), epoch)[0] for epoch in (0, 1)))
