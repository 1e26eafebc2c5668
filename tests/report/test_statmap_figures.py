import gzip

import nibabel as nib
import numpy as np
import pandas as pd
import pytest

from equipool.exceptions import EquipoolError, InputError
from equipool.judge.statmaps import in_volume, stat_map
from equipool.report.statmap_figures import statmap_figure, write_statmap
from equipool.report.style import save_figure

AFFINE = np.array([[-8.0, 0, 0, 45], [0, 8, 0, -60], [0, 0, 8, -30], [0, 0, 0, 1]])


@pytest.fixture(scope="module")
def pool():
    """Thirty people, a ball as the brain, and an effect in one corner of it: mask, truth, map, mean brain."""
    rng = np.random.default_rng(0)
    grid = np.indices((12, 14, 12)) - np.array([5.5, 6.5, 5.5])[:, None, None, None]
    mask = (grid**2).sum(axis=0) < 30
    inside = np.argwhere(mask)
    truth = -3.0 * ((inside[:, 0] > 6) & (inside[:, 2] > 6))
    dx = np.resize(["AD", "CN"], 30)
    values = rng.normal(size=(30, mask.sum())) + np.outer(dx == "AD", truth)
    return mask, truth, stat_map(values, dx, positive="AD"), in_volume(values.mean(axis=0), mask)


def coloured(axes):
    """Return the mean colour of the significant voxels that a row shows, and how many they are."""
    image = axes.images[1]
    shown = image.get_array()
    shown = shown[~np.ma.getmaskarray(shown)]
    return image.cmap(image.norm(shown))[:, :3].mean(axis=0), len(shown)


def test_a_row_shows_the_significant_voxels_and_tells_the_detection(pool, tmp_path):
    mask, truth, ours, mean = pool
    maps = {"naive pool": ours, "$ours_{": ours}
    figure = statmap_figure(maps, mask, AFFINE, mean, truth=truth, slices=12, alpha=0.05)
    first, *rows = figure.axes[:3]
    assert first.get_title(loc="left") == f"truth: {(truth != 0).sum()} affected voxels"
    called = ours.significant(alpha=0.05)
    assert called.sum() > 10
    for row in rows:
        (red, _, blue), count = coloured(row)
        assert count == called.sum()
        assert blue > red  # patients have less
        assert f"{called.sum()} significant voxels" in row.get_title(loc="left")
        assert f"{called[truth != 0].mean():.1%} of affected" in row.get_title(loc="left")
    assert coloured(first)[1] == (truth != 0).sum()
    assert "AD - CN" in figure.axes[-1].get_ylabel()
    assert save_figure(figure, tmp_path / "maps.png").stat().st_size > 5000


def test_slices_are_drawn_the_right_way_round(pool):
    """The affine points left, but left is on the left: the effect, at low x in mm, is in the left half."""
    mask, truth, ours, _ = pool
    figure = statmap_figure({"ours": ours}, mask, AFFINE, mask, truth=truth, slices=1)
    shown = ~np.ma.getmaskarray(figure.axes[0].images[1].get_array())
    assert shown[:, : shown.shape[1] // 2].sum() == shown.sum() > 0
    labels = [text.get_text() for text in figure.axes[1].texts]
    assert labels == ["L", "R"]
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["z = 26 mm"]


def test_slices_are_chosen_where_there_is_something_to_see(pool):
    mask, truth, ours, mean = pool
    figure = statmap_figure({"ours": ours}, mask, AFFINE, mean, truth=truth, slices=3)
    ticks = [float(tick.get_text().split()[2]) for tick in figure.axes[1].get_xticklabels()]
    assert len(ticks) == 3
    assert min(ticks) >= AFFINE[2, 3] + 8 * 6
    nothing = stat_map(np.ones((10, mask.sum())), np.arange(10) % 2)
    figure = statmap_figure({"nothing": nothing}, mask, AFFINE, np.full(mask.shape, np.nan))
    assert figure.axes[0].get_title(loc="left") == "nothing: 0 significant voxels"


@pytest.mark.parametrize("slices", [3, 8])
def test_a_single_voxel_is_seen(pool, slices):
    mask, _, _, mean = pool
    values = np.random.default_rng(1).normal(size=(30, mask.sum()))
    values[::2, np.flatnonzero((np.argwhere(mask) == (5, 6, 5)).all(axis=1))] += 50.0
    only = stat_map(values, np.arange(30) % 2)
    assert only.significant().sum() == 1
    figure = statmap_figure({"one": only}, mask, AFFINE, mean, slices=slices)
    assert coloured(figure.axes[0])[1] == 1
    assert len(figure.axes[0].get_xticklabels()) == slices  # side by side


def test_what_cannot_be_drawn_is_said(pool):
    mask, _, ours, mean = pool
    with pytest.raises(InputError, match="no map"):
        statmap_figure({}, mask, AFFINE, mean)
    with pytest.raises(InputError, match="background has shape"):
        statmap_figure({"a": ours}, mask, AFFINE, mean[1:])


def test_files_hold_the_map(pool, tmp_path):
    mask, _, ours, _ = pool
    files = write_statmap(tmp_path / "new", "dx", ours, mask, AFFINE, mni=True)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in files)
    expected = {"t": ours.t, "logp": -np.log10(ours.p), "effect": ours.effect}
    for what, values in expected.items():
        image = nib.load(tmp_path / "new" / f"dx_stat-{what}_statmap.nii.gz")
        assert image.get_data_dtype() == np.float32
        assert image.header["sform_code"] == 4
        np.testing.assert_allclose(image.affine, AFFINE)
        np.testing.assert_allclose(image.get_fdata()[mask], values, rtol=1e-6)
        assert not image.get_fdata()[~mask].any()
    table = pd.read_csv(tmp_path / "new" / "dx_clusters-fdr.tsv", sep="\t")
    assert table["voxels"].sum() == ours.significant(alpha=0.05, correction="fdr").sum() > 0
    strict = pd.read_csv(tmp_path / "new" / "dx_clusters.tsv", sep="\t")
    assert strict["voxels"].sum() == ours.significant().sum() < table["voxels"].sum()
    # The peak's coordinates lead to the voxel with its t in the volume.
    place = np.linalg.inv(AFFINE) @ [*table.loc[0, ["peak_x", "peak_y", "peak_z"]], 1]
    volume = in_volume(ours.t, mask)
    assert volume[tuple(place[:3].round().astype(int))] == pytest.approx(table.loc[0, "peak_t"], rel=1e-5)
    first = [path.read_bytes() for path in files]
    again = write_statmap(tmp_path / "again", "dx", ours, mask, AFFINE, mni=True)
    assert [path.read_bytes() for path in again] == first


def test_p_too_small_for_a_float_is_finite_in_the_file(pool, tmp_path):
    mask, *_ = pool
    dx = np.arange(400) % 2
    sure = stat_map(np.outer(dx, np.ones(mask.sum())), dx)
    path = write_statmap(tmp_path, "sure", sure, mask, AFFINE)[1]
    values = nib.Nifti1Image.from_bytes(gzip.decompress(path.read_bytes())).get_fdata()
    assert np.isfinite(values).all()
    assert values[mask].min() > 300
    assert nib.load(path).header["sform_code"] == 2


def test_nothing_is_written_where_the_call_is_wrong(pool, tmp_path):
    mask, _, ours, _ = pool
    for name, other in [("a/b", mask), ("", mask), ("dx", mask[:6]), ("dx", ~mask)]:
        with pytest.raises(InputError):
            write_statmap(tmp_path, name, ours, other, AFFINE)
    (tmp_path / "file").write_text("")
    with pytest.raises(EquipoolError, match="could not be written"):
        write_statmap(tmp_path / "file", "dx", ours, mask, AFFINE)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
