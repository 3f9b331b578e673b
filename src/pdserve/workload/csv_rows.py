"""Rows of a CSV file with a header, and the numbers in them, with the line in each complaint."""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvRow:
    trace: str
    """Which format, for complaints."""
    line: int
    cells: dict[str, str]

    def whole(self, column: str, *, least: int) -> int:
        """Raises: `ConfigError`."""
        text = self.cells[column]
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise self.complaint(f"{column} is {text!r}, which is no whole number of {least} or more")
        return int(text)

    def real(self, column: str) -> float:
        """Raises: `ConfigError`."""
        try:
            number = float(self.cells[column])
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise self.complaint(f"{column} is {self.cells[column]!r}, which is no number of 0 or more")
        return number

    def complaint(self, what: str) -> ConfigError:
        return ConfigError(f"line {self.line} of the {self.trace} trace: {what}")


def csv_rows(lines: Iterable[str], *, trace: str, columns: Sequence[str]) -> Iterator[CsvRow]:
    """Rows with at least these columns, in any order, as newer releases add some. Raises: `ConfigError`."""
    no_cells: list[str] = []
    reader = csv.reader(lines, strict=True)
    try:
        header = [name.strip().removeprefix("\ufeff") for name in next(reader, no_cells)]
        missing = [column for column in columns if column not in header]
        if missing:
            raise ConfigError(f"line 1 of the {trace} trace: the header has no {', '.join(missing)}")
        for cells in reader:
            row = CsvRow(trace=trace, line=reader.line_num, cells=dict(zip(header, cells, strict=False)))
            if len(cells) not in (0, len(header)):
                raise row.complaint(f"{len(cells)} cells under a header of {len(header)}")
            if cells:
                yield row
    except csv.Error as error:
        raise ConfigError(f"line {reader.line_num} of the {trace} trace: {error}") from error
