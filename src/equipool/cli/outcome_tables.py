"""Writing a harmonized table in the format of the one that was read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from equipool.files import write_whole

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["write_like"]


def write_like(source: Path, out: Path, frame: pd.DataFrame) -> Path:
    """Write ``harmonized`` as .csv, .tsv or .parquet, as the source is; text is written uncompressed."""
    kinds = [kind for kind in (".parquet", ".pq", ".tsv", ".txt") if kind in map(str.lower, source.suffixes)]
    if kinds and kinds[0] in (".parquet", ".pq"):
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        return write_whole(out / "harmonized.parquet", buffer.getvalue())
    mark, ending = ("\t", "tsv") if kinds else (",", "csv")
    return write_whole(out / f"harmonized.{ending}", frame.to_csv(sep=mark, index=False, lineterminator="\n"))
