import gzip
import json
import warnings
from pathlib import Path

import nibabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from equipool.data import nifti
from equipool.data import volumes as module
from equipool.data.nifti import check_volumes, write_volume
from equipool.data.volumes import Volumes
from equipool.exceptions import EquipoolError, EquipoolWarning, InputError

SHAPE = (6, 7, 5)
AFFINE = np.diag([4.0, 4.0, 4.0, 1.0])
AFFINE[:3, 3] = -12, -14, -10


def brain(seed=0, shape=SHAPE):
    """Values with a background of zeros, as brain-extracted images have."""
    image = np.random.default_rng(seed).uniform(50, 900, shape)
    image[:1], image[:, :, -1:] = 0, 0
    return image


def save(path, data, affine=AFFINE, *, dtype=np.float32, slope=None, change=None, kind=nibabel.Nifti1Image):
    image = kind(np.asarray(data, dtype=np.float64), affine)
    image.header.set_data_dtype(dtype)
    image.header.set_xyzt_units("mm")
    if slope is not None:
        image.header.set_slope_inter(*slope)
    if change is not None:
        change(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(image, path)
    return path


@pytest.fixture
def files(tmp_path):
    return [save(tmp_path / "in" / f"p{k}.nii.gz", brain(k)) for k in range(5)]


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def stored(path):
    return nibabel.load(path).get_fdata(dtype=np.float32)


# -- values ------------------------------------------------------------------------------------------------


def test_values_come_back_as_they_are_in_the_files(files, cache):
    volumes = Volumes.build(files, cache=cache)
    assert volumes.shape == (5, int((brain() != 0).sum()))
    assert len(volumes) == 5
    assert volumes.ndim == 2
    assert volumes.paths == tuple(files)
    np.testing.assert_array_equal(volumes.affine, AFFINE)
    for k, path in enumerate(files):
        np.testing.assert_allclose(volumes.read([k])[0], stored(path)[volumes.mask], atol=1e-4 * 900)


def test_the_map_is_small_and_on_disk(files, cache):
    volumes = Volumes.build(files, cache=cache)
    assert isinstance(volumes.store, np.memmap)
    assert volumes.store.dtype == np.int16
    assert volumes.read().dtype == np.float32
    assert not isinstance(volumes.read(), np.memmap)
    assert not volumes.store.flags.writeable


@given(arrays(np.float32, 40, elements=st.floats(-1e6, 1e6, width=32)))
def test_the_error_of_the_cache_is_bounded(values):
    stored, (scale, offset) = module._quantised(values)
    back = stored.astype(np.float32) * scale + offset
    span = float(values.max()) - float(values.min())
    assert np.abs(back.astype(float) - values).max() <= 1e-4 * span + np.spacing(np.abs(values).max())
    assert (back[values == 0] == 0).all()


@given(arrays(np.int32, 40, elements=st.integers(-32000, 32000)))
def test_whole_numbers_are_kept_exactly(values):
    stored, (scale, offset) = module._quantised(values.astype(np.float32))
    np.testing.assert_array_equal(stored.astype(np.float32) * scale + offset, values)


def test_selections_are_lazy_and_nest(files, cache):
    volumes = Volumes.build(files, cache=cache)
    all_values = volumes.read()
    part = volumes[np.array([True, False, True, True, False])]
    assert part.store is volumes.store
    assert part.paths == (files[0], files[2], files[3])
    np.testing.assert_array_equal(part.read(), all_values[[0, 2, 3]])
    np.testing.assert_array_equal(part[::-1].read([0, 2]), all_values[[3, 0]])
    np.testing.assert_array_equal(part.read(1), all_values[[2]])
    np.testing.assert_array_equal(volumes[1:3].read(slice(1, None)), all_values[[2]])
    np.testing.assert_array_equal(np.concatenate(list(volumes.blocks(2))), all_values)
    np.testing.assert_array_equal(part.columns(3, 9), all_values[[0, 2, 3], 3:9])
    with pytest.raises(InputError, match="not a single number"):
        volumes[0]


def test_unmask_is_the_inverse_of_masking(files, cache):
    volumes = Volumes.build(files, cache=cache)
    values = volumes.read()
    images = volumes.unmask(values, fill=-1)
    assert images.shape == (5, *SHAPE)
    np.testing.assert_array_equal(images[:, volumes.mask], values)
    assert (images[:, ~volumes.mask] == -1).all()
    np.testing.assert_array_equal(volumes.unmask(values[2], fill=-1), images[2])
    with pytest.raises(InputError, match="voxels on the last axis"):
        volumes.unmask(values[:, 1:])


def test_arrays_in_memory_behave_like_files(files, cache):
    whole = np.stack([stored(path) for path in files])
    volumes, built = Volumes.from_array(whole, AFFINE), Volumes.build(files, cache=cache)
    np.testing.assert_array_equal(volumes.mask, built.mask)
    np.testing.assert_allclose(volumes.read(), built.read(), atol=1e-4 * 900)
    np.testing.assert_array_equal(volumes[[3]].read(), whole[3][volumes.mask][None])
    assert volumes[[3]].paths == ()


@pytest.mark.parametrize(
    ("data", "mask", "words"),
    [
        (np.ones((2, 3, 3)), None, "images, x, y, z"),
        (np.ones((2, 3, 3, 3)), np.ones((3, 3, 2)), "mask has 3 × 3 × 2 voxels"),
        (np.ones((2, 3, 3, 3)), np.zeros((3, 3, 3)), "mask is empty"),
        (np.zeros((2, 3, 3, 3)), None, "No voxel"),
        (np.full((2, 3, 3, 3), np.nan), np.ones((3, 3, 3)), r"NaN or infinite within the mask in rows 1, 2"),
    ],
)
def test_arrays_that_are_no_images(data, mask, words):
    with pytest.raises(InputError, match=words):
        Volumes.from_array(data, np.eye(4), mask)


# -- mask --------------------------------------------------------------------------------------------------


def test_the_mask_is_where_half_of_the_images_have_something(tmp_path, cache):
    images = [brain(k) for k in range(4)]
    images[0][3, 3, 2] = images[1][3, 3, 2] = images[2][3, 3, 2] = 0
    images[0][4, 4, 2] = images[1][4, 4, 2] = 0
    mask = Volumes.build([save(tmp_path / f"{k}.nii", x) for k, x in enumerate(images)], cache=cache).mask
    assert not mask[3, 3, 2]
    assert mask[4, 4, 2]
    assert not mask[0].any()


def test_a_mask_can_be_given_as_array_or_file(files, tmp_path, cache):
    mask = np.zeros(SHAPE, dtype=bool)
    mask[2:4, 2:5, 1:3] = True
    path = save(tmp_path / "mask.nii.gz", mask, dtype=np.uint8)
    one, two = Volumes.build(files, mask=mask, cache=cache), Volumes.build(files, mask=path, cache=cache)
    np.testing.assert_array_equal(one.mask, mask)
    np.testing.assert_array_equal(one.read(), two.read())
    np.testing.assert_allclose(one.read()[2], stored(files[2])[mask], atol=0.1)


def test_masks_that_do_not_fit(files, tmp_path, cache):
    with pytest.raises(InputError, match="6 × 7 × 4 voxels, the images have 6 × 7 × 5"):
        Volumes.build(files, mask=np.ones((6, 7, 4)), cache=cache)
    elsewhere = save(tmp_path / "mask.nii", np.ones(SHAPE), AFFINE + np.eye(4), dtype=np.uint8)
    with pytest.raises(InputError, match="affine of the mask is not"):
        Volumes.build(files, mask=elsewhere, cache=cache)
    with pytest.raises(InputError, match="affine of the mask is not"):
        check_volumes(files, mask=elsewhere)
    with pytest.raises(InputError, match=r"no\.nii does not exist"):
        Volumes.build(files, mask=tmp_path / "no.nii", cache=cache)
    assert list(cache.iterdir()) == []


def test_nan_outside_of_a_given_mask_is_fine_and_kept(files, tmp_path, cache):
    image = brain()
    image[0] = np.nan
    path = save(tmp_path / "nan.nii.gz", image)
    with pytest.raises(InputError, match=r"nan\.nii\.gz is NaN or infinite in 35 voxels; give a mask"):
        Volumes.build([*files, path], cache=cache)
    volumes = Volumes.build([*files, path], mask=brain() != 0, cache=cache)
    written = stored(volumes.write(volumes.read([5])[0], 5, tmp_path / "out.nii.gz"))
    np.testing.assert_allclose(written, stored(path), atol=0.1)


# -- the cache ---------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """The files whose values were read."""
    seen = []
    read = nifti.read_volume
    monkeypatch.setattr(nifti, "read_volume", lambda path: (seen.append(path), read(path))[1])
    return seen


def test_files_are_read_once(files, cache, reads):
    first = Volumes.build(files, cache=cache)
    assert reads == files
    second = Volumes.build(files, cache=cache)
    assert reads == files
    np.testing.assert_array_equal(first.read(), second.read())
    np.testing.assert_array_equal(first.mask, second.mask)
    assert second.paths == tuple(files)


def test_threads_give_the_same(files, tmp_path):
    one, two = (Volumes.build(files, cache=tmp_path / str(jobs), jobs=jobs) for jobs in (1, 3))
    np.testing.assert_array_equal(one.read(), two.read())


def test_a_changed_file_is_noticed(files, cache, reads):
    before = Volumes.build(files, cache=cache).read()
    save(files[1], brain(77))
    after = Volumes.build(files, cache=cache)
    assert len(reads) == 10
    np.testing.assert_allclose(after.read([1])[0], stored(files[1])[after.mask], atol=0.1)
    np.testing.assert_array_equal(after.read([0]), before[[0]])
    assert len(list(cache.iterdir())) == 1


def test_a_removed_file_is_noticed(files, cache):
    Volumes.build(files, cache=cache)
    files[0].unlink()
    with pytest.raises(InputError, match=r"p0\.nii\.gz does not exist"):
        Volumes.build(files, cache=cache)


@pytest.mark.parametrize("name", ["values.i16", "scales.npy", "mask.npy", "facts.json"])
def test_a_damaged_cache_is_built_anew(name, files, cache, reads):
    right = Volumes.build(files, cache=cache).read()
    damaged = next(cache.iterdir()) / name
    damaged.write_bytes(damaged.read_bytes()[:20])
    np.testing.assert_array_equal(Volumes.build(files, cache=cache).read(), right)
    damaged = next(cache.iterdir()) / name
    damaged.unlink()
    np.testing.assert_array_equal(Volumes.build(files, cache=cache).read(), right)
    assert len(reads) == 15


def test_an_interrupted_build_leaves_nothing(files, cache, monkeypatch):
    read = nifti.read_volume

    def interrupted(path):
        if path == files[3]:
            raise KeyboardInterrupt
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(nifti, "read_volume", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Volumes.build(files, cache=cache)
    assert list(cache.iterdir()) == []
    assert len(Volumes.build(files, cache=cache)) == 5


def test_a_file_that_changes_while_it_is_read(files, cache, monkeypatch):
    def slow(*given, **more):
        grid = check_volumes(*given, **more)
        save(files[0], brain(5))
        return grid

    monkeypatch.setattr(module, "check_volumes", slow)
    with pytest.raises(EquipoolError, match="changed while they were read"):
        Volumes.build(files, cache=cache)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(files, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EquipoolError, match=r"could not be written.*EQUIPOOL_CACHE"):
        Volumes.build(files, cache=tmp_path / "file")


def test_the_default_place_is_the_user_s_cache(files, tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOOL_CACHE", str(tmp_path / "own"))
    Volumes.build(files)
    facts = json.loads(next((tmp_path / "own" / "images").glob("*/facts.json")).read_text())
    assert [Path(path) for path, *_ in facts["files"]] == files


# -- bad images --------------------------------------------------------------------------------------------


def claim(path, sizes):
    """Let the header claim another shape than the file holds."""
    content = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    content[42:48] = np.array(sizes, dtype="<i2").tobytes()
    path.write_bytes(gzip.compress(bytes(content)) if path.suffix == ".gz" else bytes(content))


def truncated(path):
    save(path, brain())
    path.write_bytes(path.read_bytes()[:-12])


def in_metres(image):
    image.header.set_xyzt_units("meter")


def flipped():
    return AFFINE @ np.diag([-1.0, 1, 1, 1])


def rotated():
    turn = np.eye(4)
    turn[:2, :2] = [[0.96, -0.28], [0.28, 0.96]]
    return turn @ AFFINE


def spotted(value):
    image = brain()
    image[2, 2, 2] = value
    return image


BAD = {
    "truncated.nii": (truncated, "can hold; is it whole"),
    "truncated.nii.gz": (truncated, "cannot be read to its end"),
    "header.nii.gz": (lambda p: p.write_bytes(gzip.compress(bytes(100))), "is not a NIfTI file, or broken"),
    "empty.nii": (lambda p: p.write_bytes(b""), "is not a NIfTI file, or broken"),
    "text.nii.gz": (lambda p: p.write_text("not an image"), "is not a NIfTI file, or broken"),
    "other.mgz": (
        lambda p: nibabel.save(nibabel.MGHImage(np.ones(SHAPE, np.float32), AFFINE), p),
        "not a NIfTI",
    ),
    "folder.nii": (lambda p: p.mkdir(), "is a folder"),
    "absent.nii": (lambda p: None, "does not exist"),
    "linked.nii": (lambda p: p.symlink_to("nowhere.nii"), r"datalad get\?"),
    "huge.nii": (lambda p: claim(save(p, brain()), (2000, 2000, 2000)), "claims 2000 × 2000 × 2000 voxels"),
    "bomb.nii.gz": (lambda p: claim(save(p, brain()), (30000, 30000, 30000)), "claims 30000 × 30000"),
    "short.nii.gz": (lambda p: claim(save(p, brain()), (6, 7, 50)), "has 6 × 7 × 50 voxels of 4 × 4 × 4 mm"),
    "negative.nii": (lambda p: claim(save(p, brain()), (-6, 7, 5)), "negative"),
    "flat.nii": (lambda p: save(p, np.ones((6, 7))), "has the shape 6 × 7, not one three-dimensional"),
    "series.nii": (lambda p: save(p, np.ones((*SHAPE, 3))), "has the shape 6 × 7 × 5 × 3"),
    "shape.nii": (
        lambda p: save(p, brain(0, (6, 7, 6))),
        "6 × 7 × 6 voxels of .* expected 6 × 7 × 5 voxels of .* as in 5 of 6 files",
    ),
    "left.nii": (
        lambda p: save(p, brain(), flipped()),
        "4 × 4 × 4 mm, LAS, expected .* mm, RAS as in 5 of 6 files",
    ),
    "sizes.nii": (
        lambda p: save(p, brain(), AFFINE * 0.5),
        "voxels of 2 × 2 × 2 mm, RAS, expected 6 × 7 × 5 voxels of 4 × 4 × 4 mm",
    ),
    "rotated.nii": (lambda p: save(p, brain(), rotated()), "is rotated"),
    "metres.nii": (lambda p: save(p, brain(), change=in_metres), "units of meter, not mm"),
    "nan.nii": (lambda p: save(p, spotted(np.nan)), "NaN or infinite in 1 voxel"),
    "inf.nii": (lambda p: save(p, spotted(np.inf)), "NaN or infinite in 1 voxel"),
    "beyond.nii": (lambda p: save(p, spotted(1e300), dtype=np.float64), "NaN or infinite in 1 voxel"),
    "constant.nii": (lambda p: save(p, np.full(SHAPE, 7.0)), r"is constant \(7 everywhere\)"),
    "zero.nii": (lambda p: save(p, np.zeros(SHAPE)), "is 0 everywhere"),
    "complex.nii": (
        lambda p: nibabel.save(nibabel.Nifti1Image(np.ones(SHAPE, np.complex64), AFFINE), p),
        "complex64, not plain numbers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_each_bad_image_is_named_and_nothing_is_written(name, files, tmp_path, cache):
    make, words = BAD[name]
    path = tmp_path / name
    make(path)
    with pytest.raises(InputError, match=words) as caught:
        Volumes.build([*files, path], cache=cache)
    assert str(path) in str(caught.value)
    assert not any(str(good) in str(caught.value) for good in files)
    assert list(cache.iterdir()) == []


def test_a_shift_is_given_in_mm_and_a_tiny_one_is_none(files, tmp_path):
    shifted = AFFINE.copy()
    shifted[0, 3] += 2.5
    with pytest.raises(InputError, match=r"shifted by 2\.5 mm"):
        check_volumes([*files, save(tmp_path / "far.nii", brain(), shifted)])
    shifted[0, 3] = AFFINE[0, 3] + 5e-4
    check_volumes([*files, save(tmp_path / "near.nii", brain(), shifted)])


def test_all_bad_images_are_named_at_once(files, tmp_path):
    bad = [save(tmp_path / f"zero{k:02}.nii", np.zeros(SHAPE)) for k in range(110)]
    with pytest.raises(InputError) as caught:
        check_volumes([*files, tmp_path / "absent.nii", *bad, files[2]])
    text = str(caught.value)
    assert text.startswith("112 of 117 images cannot be used")
    assert "absent.nii does not exist" in text
    assert all(f"zero{k:02}.nii is 0 everywhere" in text for k in range(99))
    assert text.endswith("and 12 more")


def test_a_file_given_twice_is_named(files):
    with pytest.raises(InputError, match=r"p1\.nii\.gz is given twice, in rows 2 and 6"):
        check_volumes([*files, files[0].parent / "." / files[1].name])


def test_no_images_at_all(files):
    with pytest.raises(InputError, match="jobs must be at least 1"):
        check_volumes(files, jobs=0)
    with pytest.raises(InputError, match="No images were given"):
        check_volumes([])


def test_only_bad_images(tmp_path):
    with pytest.raises(InputError, match="1 of 1 image cannot be used"):
        check_volumes([tmp_path / "absent.nii"])


def test_other_brightness_is_warned_of(files, tmp_path, cache):
    odd = save(tmp_path / "odd.nii", brain() / 1e5)
    with pytest.warns(EquipoolWarning, match=r"odd\.nii.* 1000 times above or below"):
        volumes = Volumes.build([*files, odd], cache=cache)
    np.testing.assert_allclose(volumes.read([5])[0], stored(odd)[volumes.mask], atol=1e-6)


def test_one_volume_in_four_axes_and_unknown_units_are_fine(files, tmp_path, cache):
    four = save(
        tmp_path / "four.nii", brain(3)[..., None], change=lambda i: i.header.set_xyzt_units("unknown")
    )
    volumes = Volumes.build([*files, four], cache=cache)
    np.testing.assert_allclose(volumes.read([5])[0], brain(3)[volumes.mask], atol=0.1)
    assert stored(volumes.write(volumes.read([5])[0], 5, tmp_path / "out.nii")).shape == SHAPE


# -- writing -----------------------------------------------------------------------------------------------


def described(image):
    image.header["descrip"] = b"made by hand"
    image.header["intent_name"] = b"brain"
    image.set_sform(AFFINE, 4)
    image.set_qform(AFFINE, 2)


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize(
    ("dtype", "slope"),
    [(np.int16, (0.037, -20.0)), (np.int16, None), (np.uint8, None), (np.float32, None), (np.float64, None)],
)
def test_the_round_trip_keeps_values_and_header(dtype, slope, kind, tmp_path, cache):
    paths = []
    for k in range(3):
        data = brain(k) / 4 if dtype is np.uint8 else brain(k)
        data = np.rint(data) if slope is None and np.issubdtype(dtype, np.integer) else data
        path = tmp_path / f"{k}.nii.gz"
        paths.append(save(path, data, dtype=dtype, slope=slope, change=described, kind=kind))
    volumes = Volumes.build(paths, mask=brain() > 100, cache=cache)
    out = volumes.write(volumes.read([1])[0], 1, tmp_path / "out" / "1.nii.gz")
    was, now = nibabel.load(paths[1]), nibabel.load(out)
    assert np.abs(was.get_fdata() - now.get_fdata()).max() <= 1e-3 * np.ptp(was.get_fdata())
    assert type(was) is type(now)
    assert now.get_data_dtype() == np.float32
    np.testing.assert_array_equal(was.affine, now.affine)
    for name in ("xyzt_units", "descrip", "intent_name", "sform_code", "qform_code", "pixdim", "srow_x"):
        np.testing.assert_array_equal(was.header[name], now.header[name])
    assert (now.dataobj.slope, now.dataobj.inter) == (1.0, 0.0)


def test_changed_voxels_are_written_and_the_rest_stays(files, tmp_path, cache):
    mask = brain() > 500
    volumes = Volumes.build(files, mask=mask, cache=cache)[[3, 4]]
    written = stored(volumes.write(np.full(volumes.shape[1], -5.5), 1, tmp_path / "o.nii"))
    assert (written[mask] == -5.5).all()
    np.testing.assert_array_equal(written[~mask], stored(files[4])[~mask])


def test_sources_are_never_overwritten(files, cache):
    volumes = Volumes.build(files, cache=cache)
    before = files[0].read_bytes()
    values = volumes.read([1])[0]
    with pytest.raises(InputError, match="one of the images that were read"):
        volumes.write(values, 1, files[0])
    with pytest.raises(InputError, match="the image that was read"):
        write_volume(files[0], brain(), files[0])
    assert files[0].read_bytes() == before
    files[1].unlink()
    with pytest.raises(InputError, match="not there any more"):
        volumes.write(values, 1, cache / "o.nii")


def test_arrays_can_be_written_too(tmp_path):
    volumes = Volumes.from_array(np.stack([brain(0), brain(1)]), AFFINE)
    image = nibabel.load(volumes.write(volumes.read([1])[0], 1, tmp_path / "o.nii.gz"))
    np.testing.assert_allclose(image.get_fdata(), brain(1), rtol=1e-6)
    np.testing.assert_array_equal(image.affine, AFFINE)
    assert image.header.get_xyzt_units()[0] == "mm"


@pytest.mark.parametrize(("mni", "code"), [(False, 2), (True, 4)])
def test_a_new_image_says_where_it_is(mni, code, tmp_path):
    mask = brain() > 500
    image = nibabel.load(write_volume(tmp_path / "m.nii.gz", mask, AFFINE, mni=mni, intent=("estimate",)))
    assert image.get_data_dtype() == np.uint8
    assert (image.get_fdata() == mask).all()
    assert int(image.header["sform_code"]) == code
    assert image.header.get_intent()[0] == "estimate"
    np.testing.assert_array_equal(image.affine, AFFINE)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [("o.png", brain(), "end in .nii"), ("o.nii", brain()[1:], "5 × 7 × 5 voxels, o.nii needs 6 × 7 × 5")],
)
def test_what_cannot_be_written(name, values, words, files, tmp_path):
    with pytest.raises(InputError, match=words):
        write_volume(tmp_path / name, values, files[0])
    assert not (tmp_path / name).exists()


def test_the_same_values_give_the_same_bytes(files, tmp_path):
    one, two = (write_volume(tmp_path / f"{k}" / "o.nii.gz", brain(), files[0]) for k in range(2))
    assert one.read_bytes() == two.read_bytes()


def test_real_brains(arc4mm, cache):
    paths = sorted(arc4mm.rglob("*.nii.gz"))[:6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        volumes = Volumes.build(paths, cache=cache)
    whole = stored(paths[4])[volumes.mask]
    assert np.abs(volumes.read([4])[0] - whole).max() <= 1e-4 * np.ptp(whole)
