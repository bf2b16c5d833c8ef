"""Make self-contained HTML pages: one file, with its figures inside."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #222; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 28px 10px 60px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 2px; }
h2 { font-size: 18px; margin: 34px 0 8px; padding-top: 12px; border-top: 1px solid #ddd; }
h3 { font-size: 15px; margin: 0 0 4px; }
.scroll + h3, .note + h3 { margin-top: 18px; }
.lead { color: #666; margin: 0 0 18px; }
.findings { padding-left: 20px; margin: 0; }
.findings li { margin: 5px 0; }
.warning { background: #fff6dd; border-left: 4px solid #d9a400; padding: 7px 12px; margin: 10px 0; }
.figures { display: grid; grid-template-columns: 1fr 1fr; gap: 26px 20px; align-items: start; }
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure img { display: block; width: 100%; height: auto; }
figcaption { color: #666; font-size: 13px; line-height: 1.4; margin-top: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; line-height: 1.35; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 7px; text-align: right; border-bottom: 1px solid #e6e6e6; white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; color: #444; border-bottom-color: #aaa; }
th:first-child, td:first-child, .text { text-align: left; }
td.label { white-space: normal; min-width: 130px; }
td svg { vertical-align: middle; margin-right: 7px; }
td.best { font-weight: 650; }
td.note, p.note { color: #666; font-size: 13px; }
.unfinished { color: #9a4b00; }
code { font: 12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { margin: 14px 0; }
details > summary { cursor: pointer; font-weight: 600; font-size: 16px; padding: 6px 0; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 7px;
  vertical-align: -1px; }
@media (max-width: 760px) { .figures { grid-template-columns: 1fr; } }
"""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Describes a figure on disk.

    Attributes:
        path: the PNG file.
        title: its heading on the page.
        caption: what it shows, in a sentence or two.
        wide: takes a whole row.
        section: the part of the page that it belongs to.
    """

    path: Path
    title: str
    caption: str
    wide: bool
    section: str = "main"


def document(title: str, body: str) -> str:
    """Return a self-contained page of this project's look; ``body`` is HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def text(value: object) -> str:
    """Return a value's text, escaped for HTML."""
    return html.escape(str(value))


def figure(drawn: Drawn) -> str:
    """Return a figure with its title and caption, the image inside."""
    data = base64.b64encode(drawn.path.read_bytes()).decode()
    return (
        f"<figure{' class=wide' if drawn.wide else ''}><h3>{text(drawn.title)}</h3>"
        f'<img alt="{text(drawn.title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text(drawn.caption)}</figcaption></figure>"
    )


def figures(drawn: Sequence[Drawn]) -> str:
    """Return figures side by side, wide ones in rows of their own."""
    return f'<div class="figures">{"".join(map(figure, drawn))}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table.

    Args:
        header: cells as HTML, or whole ``<th>`` elements.
        rows: cells as whole ``<td>`` elements, such as those of ``cell``.
    """
    head = "".join(cell if cell.startswith("<th") else f"<th>{cell}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(content: str, style: str = "") -> str:
    """Return a cell of a table; ``content`` is HTML, ``style`` its class, such as "text" or "best"."""
    return f'<td class="{style}">{content}</td>' if style else f"<td>{content}</td>"


def heading(content: str) -> str:
    """Return the heading of a column of words, which stand at the left; ``content`` is HTML."""
    return f'<th class="text">{content}</th>'
