"""Tables of what a compatible class serves: one case a row, which runs on ranks."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATUSES = ("served", "refused", "missing")


@dataclass(frozen=True)
class Row:
    """One row: where it stands, what becomes of it here, and the function that checks this on ranks.

    Its status is `served` (it does what the original does), `refused` (an error names what to use instead) or
    `missing`.
    """

    section: str
    name: str
    status: str
    note: str
    ranks: int
    case: Callable[[], None]


class Table:
    """Rows by section and name, as in `rows["1.2 no_sync"]`."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def row(self, section: str, name: str, status: str = "served", ranks: int = 2) -> Callable[[Any], Any]:
        """Enter a case under its row; the first line of its docstring is the row's note."""

        def enter(case: Callable[[], None]) -> Callable[[], None]:
            key, note = f"{section} {name}", (case.__doc__ or "").strip().splitlines()
            assert key not in self.rows and status in STATUSES and note, key
            self.rows[key] = Row(section, name, status, note[0], ranks, case)
            return case

        return enter

    def names(self, section: str) -> str:
        """The names of all rows of a section, in one line."""
        return " ".join(each.name for each in self.rows.values() if each.section == section)

    @property
    def counts(self) -> str:
        """How many rows there are of each status."""
        counts = Counter(each.status for each in self.rows.values())
        return ", ".join(f"{counts[status]} {status}" for status in STATUSES)

    def counts_said_in(self, page: str) -> str:
        """The counts that a page of the docs has, in the same words."""
        text = (Path(__file__).parents[2] / "docs" / page).read_text()
        found = re.search(r"(\d+)\s+rows[^.]*?(\d+) are served, (\d+) refused[^.]*?(\w+) missing", text)
        assert found is not None, f"{page} does not say how many rows are served"
        total, served, refused, missing = (int(each) if each != "none" else 0 for each in found.groups())
        assert total == served + refused + missing, page
        return f"{served} served, {refused} refused, {missing} missing"

    @property
    def missing(self) -> list[str]:
        """The rows that nobody serves yet."""
        return [key for key, each in self.rows.items() if each.status == "missing"]
