import os

import pytest

from equipool.exceptions import EquipoolError
from equipool.files import write_whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = write_whole(tmp_path / "new" / "a.txt", "old")
    assert write_whole(path, b"new").read_bytes() == b"new"
    assert os.listdir(path.parent) == ["a.txt"]


def test_what_was_there_stays_where_writing_fails(tmp_path):
    (tmp_path / "file").write_text("years of work")
    with pytest.raises(EquipoolError, match="could not be written"):
        write_whole(tmp_path / "file" / "a.txt", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(EquipoolError, match="could not be written"):
        write_whole(tmp_path / "folder", "x")
    assert (tmp_path / "file").read_text() == "years of work"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
