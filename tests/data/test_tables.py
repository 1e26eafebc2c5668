import gzip
import subprocess
import sys

import pandas as pd
import pytest

import equipool as ep
from equipool.exceptions import InputError, MissingExtraError

TABLE = pd.DataFrame({"id": ["001", "002"], "site": ["1", "2"], "age": [30.5, 40.0]})


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.TSV", "t.parquet"])
def test_tables_come_back_as_they_were_written(name, tmp_path):
    path = tmp_path / name
    if name.endswith("parquet"):
        TABLE.to_parquet(path)
    else:
        TABLE.to_csv(path, index=False, sep="\t" if "tsv" in name.lower() else ",")
    read = ep.read_table(path, labels=["id", "site"])
    pd.testing.assert_frame_equal(read, TABLE, check_dtype=False)
    assert read["id"].tolist() == ["001", "002"]


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_found_in_the_header(separator, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("\ufeff" + TABLE.to_csv(index=False, sep=separator), encoding="utf-8")
    assert list(ep.read_table(path).columns) == ["id", "site", "age"]


def test_quotes_newlines_and_other_scripts_in_names_survive(tmp_path):
    names = ["site", 'a "quoted", name', "Größe", "厚さ", "<b>x</b>", "=1+1"]
    table = pd.DataFrame([["A", 1, 2, 3, 4, 5]], columns=names)
    path = tmp_path / "t.csv"
    table.to_csv(path, index=False)
    assert list(ep.read_table(path).columns) == names


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.xlsx", b"PK", "save it as .csv, .tsv or .parquet"),
        ("t", b"a,b", "save it as .csv"),
        ("t.csv", b"", "is empty"),
        ("t.csv", "site,größe\nä,1\n".encode("latin-1"), "not UTF-8"),
        ("t.csv", b"a,b,a\n1,2,3\n", "column 'a' more than once"),
        ("t.csv", b"a,b\n1,2,3,4\n1,2\n", "more cells than the header"),
        ("t.tsv", b"site\tage\n1\tA\t20\n2\tB\t31\n", "row.names = FALSE"),
        ("t.parquet", b"PAR1 broken", "cannot be read as Parquet"),
        ("t.csv.gz", b"not gzip", "cannot be read as a table"),
        ("t.csv.zip", b"not zip", "cannot be read as a table"),
        ("t.csv.xz", b"not xz", "cannot be read as a table"),
        ("t.csv.gz", b"".join([gzip.compress(bytes(9999))[:20], b"xx" * 9]), "cannot be read as a table"),
        ("t.csv.gz", gzip.compress(b"a,b\n" + b"1,2\n" * 5000)[:-20], "cannot be read as a table"),
    ],
)
def test_files_that_are_no_table(name, content, words, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        ep.read_table(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        ep.read_table(tmp_path / "t.csv")
    with pytest.raises(InputError, match="is a folder"):
        ep.read_table(tmp_path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    TABLE.to_parquet(path)

    def no_parquet(*_, **__):
        raise ImportError("no pyarrow")

    monkeypatch.setattr(pd, "read_parquet", no_parquet)
    with pytest.raises(MissingExtraError, match=r"pip install 'equipool\[parquet\]'"):
        ep.read_table(path)


def test_long_rows_are_refused_outside_the_tests_too(tmp_path):
    """pandas only warns there, and in the tests warnings are errors anyway: run it as a user would."""
    path = tmp_path / "t.csv"
    path.write_text("site,age\nA,20,5.5\nB,30,6.5\n")
    command = [sys.executable, "-m", "equipool", "check", str(path), "--site", "site"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "more cells than the header" in run.stderr


def test_marks_and_newlines_in_quoted_names_do_not_mislead(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('site,"age;in;years;now","a\nb",id\nA,20,1,001\nB,30,2,002\n')
    frame = ep.read_table(path, labels=["id"])
    assert list(frame.columns) == ["site", "age;in;years;now", "a\nb", "id"]
    assert frame["id"].tolist() == ["001", "002"]


def test_decimal_commas_are_read_as_numbers(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("site;age;v\nA;20,5;1\nB;30,25;2\n")
    assert ep.read_table(path, labels=["site"])["age"].tolist() == [20.5, 30.25]


def test_a_table_of_thousands_of_columns(tmp_path):
    path = tmp_path / "t.csv"
    names = ",".join(f"lh_vertex_{k:05d}" for k in range(5_000))
    path.write_text(f"{names}\n{','.join(['1'] * 5_000)}\n")
    assert ep.read_table(path).shape == (1, 5_000)
