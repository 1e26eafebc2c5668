"""The page of the report, without a browser: one file, escaped, with the account's numbers."""

import base64
import hashlib
import io
import re
import shutil

import numpy as np
import pandas as pd
import pytest

import equipool as ep
from equipool.cli.app import main
from equipool.cli.commands.report import _same
from equipool.data import PooledDataset, check
from equipool.report.account import Account, account_of
from equipool.report.page import report_page

ROLES = ["--site", "site", "--covariate", "age", "--target", "dx", "--id", "id"]
NASTY = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_models):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equipool.judge.heldout.MANY_PARTICIPANTS", 0)
        yield


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.csv"
    ep.simulate_table(people=40, features=6, overlap=0.7).pool.to_frame().to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def harmonized(table, tmp_path_factory):
    out = tmp_path_factory.mktemp("harmonized") / "out"
    assert main(["harmonize", str(table), *ROLES, "--out", str(out)]) == 0
    return out


@pytest.fixture
def folder(harmonized, tmp_path):
    """A copy of what harmonize wrote, to be spoilt."""
    return shutil.copytree(harmonized, tmp_path / "out")


def numbers(page, key):
    """Return the table that a figure gives to download."""
    address = re.search(rf'download="{key}.csv" href="data:text/csv;base64,([^"]+)"', page)[1]
    return pd.read_csv(io.BytesIO(base64.b64decode(address))).to_dict("list")


def account_of_frame(frame, **roles):
    pool = PooledDataset.from_frame(frame, **roles)
    return account_of(pool, pool.features, None, check(frame, **roles))


def test_harmonize_writes_a_page_that_needs_nothing_else(folder, table):
    page = (folder / "report.html").read_text()
    assert not re.search(r"(?:src|href|url\()\s*=?\s*[\"']?(?:https?:|//|file:)", page)
    assert "http" not in page.replace("http-equiv", "")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert "default-src 'none'" in policy.replace("&#39;", "'")
    assert "unsafe" not in policy
    assert " style=" not in page
    for tag in ("style", "script"):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)[1]
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert hashlib.sha256(table.read_bytes()).hexdigest() in page


def test_sections_come_in_order(folder):
    page = (folder / "report.html").read_text()
    titles = re.findall(r"<h2[^>]*>([^<]+)</h2>", page)
    assert titles == [
        "What went in",
        "Did it work?",
        "What it looks like",
        "What it found",
        "How to cite and reproduce",
    ]
    assert re.findall(r"<h1>([^<]+)</h1>", page) == ["Harmonization report: table.csv"]


def test_the_page_holds_the_account_s_numbers(folder):
    page = (folder / "report.html").read_text()
    account = Account.from_json((folder / "account.json").read_text())
    assert numbers(page, "site")["mean"] == pytest.approx(account.held_out["site_scores"]["mean"])
    assert numbers(page, "effects")["harmonized_t"] == account.effects["table"]["harmonized_t"]
    figures = set(re.findall(r'<figure id="([\w-]+)"', page))
    assert figures - {"causes"} == set(re.findall(r'download="([\w-]+).csv"', page))
    assert page.count('<details class="numbers">') == len(figures) - 1
    for sentence in account.verdict:
        assert sentence["text"] in page


def test_every_drawing_has_an_alt_text(folder):
    page = (folder / "report.html").read_text()
    drawings = re.findall(r'role="img" aria-label="[^"]{20,}"><svg', page)
    assert len(drawings) == page.count("<svg") > 10


def test_report_makes_the_same_page_again_without_fitting(folder, capsys, monkeypatch):
    page = folder / "report.html"
    before = page.read_bytes()
    page.unlink()
    monkeypatch.setattr("equipool.estimators.SiteHarmonizer.fit", None)
    assert main(["report", str(folder)]) == 0
    assert page.read_bytes() == before
    assert str(page) in capsys.readouterr().out


def test_no_report_leaves_it_out(table, tmp_path):
    out = tmp_path / "out"
    assert main(["harmonize", str(table), *ROLES, "--out", str(out), "--no-report"]) == 0
    assert not (out / "report.html").exists()
    assert not (out / "account.json").exists()
    assert main(["report", str(out)]) == 2


def test_anybody_s_table_is_judged_whatever_its_order(table, folder, tmp_path):
    after = pd.read_csv(folder / "harmonized.csv").sample(frac=1, random_state=0)
    after.drop(columns=["age", "dx"]).to_csv(tmp_path / "after.csv", index=False)
    out = tmp_path / "page.html"
    call = ["report", str(table), "--after", str(tmp_path / "after.csv"), *ROLES, "--out", str(out)]
    assert main(call) == 0
    page = out.read_text()
    assert "not cross-validated" in page
    shares = numbers(page, "shares")
    assert np.mean(shares["after"]) < np.mean(shares["before"]) / 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.iloc[1:], "not of the same participants"),
        (lambda t: t.drop(columns="id"), "no column 'id'"),
        (lambda t: t.assign(age=t["age"].iloc[::-1].to_numpy()), "'age' differs"),
        (lambda t: t.assign(age=t["age"] + 1), "matched by 'id'"),
        (lambda t: t.drop(columns="hippocampus"), "no column 'hippocampus'"),
    ],
)
def test_tables_that_do_not_belong_together_are_refused(table, tmp_path, capsys, change, message):
    change(pd.read_csv(table)).to_csv(tmp_path / "after.csv", index=False)
    out = tmp_path / "page.html"
    assert (
        main(["report", str(table), "--after", str(tmp_path / "after.csv"), *ROLES, "--out", str(out)]) == 2
    )
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([34, 51], [34.0, 51.0], True),
        (["34", "51"], [34.0, 51.0], True),
        ([34.123456, None], [34.1235, None], True),
        ([34, 51], [51, 34], False),
        ([34, None], [34, 51], False),
        (["M", "F"], ["M", "F"], True),
        (["M", "F"], ["F", "M"], False),
        (["M", "F"], [0, 1], False),
    ],
)
def test_numbers_are_the_same_however_they_are_written(one, other, same):
    assert _same(pd.Series(one), pd.Series(other)) is same
    assert not _same(pd.Series([100001]), pd.Series([100002]), exactly=True)  # sites


def test_a_page_that_cannot_be_written_is_refused_before_judging(table, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("equipool.cli.commands.report._two_tables", None)
    (tmp_path / "file").write_text("no folder")
    out = tmp_path / "file" / "page.html"
    assert main(["report", str(table), "--after", str(table), *ROLES, "--out", str(out)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_nobody_else_s_file_is_overwritten(folder, tmp_path, capsys):
    mine = tmp_path / "thesis.html"
    mine.write_text("years of work")
    assert main(["report", str(folder), "--out", str(mine)]) == 2
    assert "no report of equipool" in capsys.readouterr().err
    assert mine.read_text() == "years of work"
    page = tmp_path / "page.html"
    for _ in range(2):  # over its own earlier page
        assert main(["report", str(folder), "--out", str(page)]) == 0


def test_names_are_escaped_everywhere():
    frame = ep.simulate_table(people=30, features=4).pool.to_frame()
    names = {"site": NASTY + "s", "age": NASTY + "c", "dx": NASTY + "t", "hippocampus": NASTY + "f"}
    frame = frame.rename(columns=names)
    frame[names["site"]] = frame[names["site"]].replace({"GE": NASTY + "'\"&"})
    frame[names["dx"]] = NASTY + frame[names["dx"]]
    account = account_of_frame(
        frame, site=names["site"], covariates=names["age"], target=names["dx"], id="id"
    )
    page = report_page(account)
    assert "<img src=x" not in page
    assert page.count("<script") == page.count("</script>")
    assert "&lt;img src=x" in page


@pytest.mark.parametrize(
    "roles", [{}, {"covariates": ["age"]}, {"target": "dx"}, {"target": "insula", "task": "number"}]
)
def test_a_page_is_made_of_whatever_was_named(roles):
    frame = ep.simulate_table(people=30, features=8).pool.to_frame()
    if "target" not in roles or roles["target"] != "dx":
        frame = frame.drop(columns="dx")
    if "covariates" not in roles:
        frame = frame.drop(columns="age")
    page = report_page(account_of_frame(frame, site="site", id="id", **roles))
    assert 'id="site"' in page
    assert ('id="signals"' in page) == bool(roles)


def test_missing_values_and_repeated_visits_reach_the_report(table, tmp_path):
    frame = pd.read_csv(table)
    frame.loc[3:20, "hippocampus"] = np.nan
    frame["who"] = np.arange(len(frame)) // 2
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    out = tmp_path / "out"
    call = ["harmonize", str(tmp_path / "gaps.csv"), *ROLES, "--subject", "who", "--missing", "impute"]
    assert main([*call, "--out", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert "18 filled-in cells" in page
    assert "18 cells of 1 feature were filled in, not measured" in page


def test_many_sites_are_drawn_by_the_largest():
    pool = ep.simulate_table(sites=[f"s{k:02d}" for k in range(40)], people=7, features=3, overlap=1.0).pool
    page = report_page(account_of_frame(pool.to_frame(), site="site", covariates="age", id="id", target="dx"))
    assert "The 30 largest of 40 sites." in page
    assert len(numbers(page, "sizes")["site"]) == 40
