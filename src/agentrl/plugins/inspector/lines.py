"""Text in lines and columns, readable at 80 columns and suitable for copying.

Input: cells. Output: rich renderables. Ids and addresses are never truncated: a table wider than
the terminal shows its long columns below each row, and in a pipe every row is one line. External
text is never parsed as markup and cannot control the terminal.
"""

import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from agentrl.runtime.printable import one_line, printable

PIPE_WIDTH = 1_000_000
_GAP = "  "


class Rows:
    """A table. Columns that start with ">" are right-aligned; those with "+" are long."""

    def __init__(self, *columns: str) -> None:
        self._names = [column.lstrip(">+") for column in columns]
        self._is_right = [column.startswith(">") for column in columns]
        self._is_long = [column.startswith("+") for column in columns]
        self._rows: list[list[Text]] = []

    def add(self, *cells: str | Text) -> None:
        """Add a row of as many cells as there are columns."""
        assert len(cells) == len(self._names)
        self._rows.append(
            [Text(one_line(cell)) if isinstance(cell, str) else cell for cell in cells]
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw all columns side by side if they fit, else the long ones below each row."""
        columns = range(len(self._names))
        widths = [self._width(column) for column in columns]
        is_narrow = sum(widths) + len(_GAP) * (len(widths) - 1) > options.max_width
        inline = [column for column in columns if not (is_narrow and self._is_long[column])]
        below = [column for column in columns if column not in inline]
        head = [Text(self._names[column]) for column in columns]
        yield self._line(head, inline, widths, "dim")
        for row in self._rows:
            yield self._line(row, inline, widths)
            for column in below:
                if row[column].plain:
                    yield whole(Text.assemble(_GAP, (self._names[column], "dim"), " ", row[column]))

    def _width(self, column: int) -> int:
        cells = [self._names[column], *(row[column].plain for row in self._rows)]
        return max(map(cell_len, cells))

    def _line(
        self, row: Sequence[Text], columns: Sequence[int], widths: Sequence[int], style: str = ""
    ) -> Text:
        line = Text(style=style)
        for column in columns:
            space = " " * (widths[column] - cell_len(row[column].plain))
            line.append(_GAP if line.plain else "")
            line.append(space if self._is_right[column] else "")
            line.append_text(row[column])
            line.append("" if self._is_right[column] else space)
        line.rstrip()
        return whole(line)


def heading(text: str) -> Text:
    """Return the title of a page."""
    return whole(Text(one_line(text), style="bold"))


def labeled(label: str, text: str, style: str = "dim", limit: int | None = None) -> Text:
    """Return a label and text, which is wrapped between words and cut to `limit` characters."""
    line = Text(f"{label:>12}  ", style=style)
    line.append(printable(text, limit), style="default not bold not dim")
    return line


def whole(line: Text) -> Text:
    """Return a line that only the terminal itself breaks."""
    line.no_wrap, line.overflow = True, "ignore"
    return line


def show(page: RenderableType) -> None:
    """Print a page to standard output; in a pipe, lines are not wrapped."""
    console = Console(highlight=False)
    # FORCE_COLOR, which notebook kernels set, does not make a pipe a terminal.
    if not sys.stdout.isatty():
        console = Console(highlight=False, width=PIPE_WIDTH)
    console.print(page, crop=False)
