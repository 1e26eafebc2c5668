"""Simulated brains: what they promise of people, ages, disease and scanners."""

import nibabel
import numpy as np
import pandas as pd
import pytest

import equipool as ep
from equipool.exceptions import InputError
from equipool.simulate.brains import COHORTS, custom_cohort, simulate_brains


def people_of(like, **settings):
    return simulate_brains(like, resolution=8, **settings).people


def ranges(people):
    return people.groupby("site")["age"].agg(["min", "max"]).sort_values("min").to_numpy()


def test_the_same_seed_gives_the_same_bits(brains):
    again = simulate_brains(brains.cohort, resolution=8)
    pd.testing.assert_frame_equal(again.people, brains.people)
    assert (again.scan(5) == brains.scan(5)).all()
    other = simulate_brains(brains.cohort, resolution=8, random_state=1)
    assert not (other.scan(5) == brains.scan(5)).all()


def test_scan_and_clean_volume_do_not_depend_on_how_they_are_made(brains):
    scan, clean = brains.both(3)
    assert (scan == brains.scan(3)).all()
    assert (clean == brains.clean(3)).all()


@pytest.mark.parametrize(
    ("like", "counts"),
    [
        ("adni", {"GE": (44, 78), "Philips": (32, 50), "Siemens": (83, 162)}),
        ("adcp", {"site1": (10, 39), "site2": (10, 33), "site3": (5, 19)}),
    ],
)
def test_the_counts_are_the_papers(like, counts):
    people = people_of(like)
    for site, (patients, controls) in counts.items():
        dx = people.loc[people["site"] == site, "dx"]
        assert ((dx == "AD").sum(), (dx == "CN").sum()) == (patients, controls)
    assert len(people) == sum(map(sum, counts.values()))
    assert people["participant_id"].is_unique
    assert people["age"].between(*COHORTS[like].ages).all()


def test_overlap_of_ages():
    disjoint = ranges(people_of(custom_cohort([30, 30, 30]), overlap=0.0))
    assert (disjoint[1:, 0] >= disjoint[:-1, 1]).all()
    shared = ranges(people_of(custom_cohort([30, 30, 30]), overlap=1.0))
    common = shared[:, 1].min() - shared[:, 0].max()
    assert common > 0.5 * (shared[:, 1].max() - shared[:, 0].min())
    with pytest.raises(InputError, match="between 0 and 1"):
        simulate_brains("adni", overlap=1.5)


def test_wrong_cohorts_are_refused():
    with pytest.raises(InputError, match="no cohort 'abide'"):
        simulate_brains("abide")
    with pytest.raises(InputError, match="site2 cannot have 9 patients among 5"):
        custom_cohort([5, 5], [1, 9])
    with pytest.raises(InputError, match="2 sites with participants, 1 with patients"):
        custom_cohort([5, 5], [1])
    with pytest.raises(InputError, match="between 1 and 8 mm"):
        simulate_brains("adni", resolution=20)


def test_the_disease_takes_the_hippocampus(brains):
    effect = brains.disease_effect
    where = brains.anatomy.affine @ [*np.unravel_index(np.abs(effect).argmax(), effect.shape), 1]
    assert np.linalg.norm([abs(where[0]) - 27, where[1] + 20, where[2] + 15]) < 15
    assert effect.flat[np.abs(effect).argmax()] < 0
    affected, unaffected = brains.affected()
    assert not (affected & unaffected).any()
    assert np.abs(effect[affected]).min() > 5 * np.abs(effect[unaffected]).max()


def test_older_brains_have_more_fluid(brains):
    for person in range(4):
        fluid = [float(brains.tissues(person, age=age)[2].sum()) for age in (55, 70, 85)]
        assert fluid == sorted(fluid)
        assert fluid[2] > 1.05 * fluid[0]


def test_scanners_differ_more_than_scans_of_one(brains):
    tissues = brains.tissues(0)
    mask = brains.anatomy.mask

    def scan(scanner, person):
        values = brains.image(tissues, brains.cohort.scanners[scanner], person)[mask]
        return values / np.median(values)

    def apart(a, b):
        return np.sqrt(((a - b) ** 2).mean())

    scans = [[scan(s, k) for k in (2 * s, 2 * s + 1)] for s in range(3)]
    within = max(apart(*pair) for pair in scans)
    between = min(apart(scans[s][0], scans[t][0]) for s, t in ((0, 1), (0, 2), (1, 2)))
    assert between > within


def test_the_folder_is_bids_with_the_truth_beside_it(brains, brain_folder):
    frame = ep.read_bids(brain_folder)
    assert frame["participant_id"].tolist() == brains.people["participant_id"].tolist()
    assert frame[["site", "dx"]].equals(brains.people[["site", "dx"]])
    image = nibabel.load(frame["path"][3])
    assert (np.asarray(image.dataobj) == brains.scan(3)).all()
    assert (image.affine == brains.anatomy.affine).all()
    truth = brain_folder / "derivatives" / "truth"
    clean = ep.read_bids(truth, participants=brain_folder / "participants.tsv")
    assert (nibabel.load(clean["path"][3]).get_fdata() == brains.clean(3)).all()
    effect = nibabel.load(truth / "disease_effect.nii.gz").get_fdata()
    assert (effect == brains.disease_effect).all()
    assert {f"site-{s.name}_field.nii.gz" for s in brains.cohort.scanners} <= {
        p.name for p in truth.iterdir()
    }
