"""A study's report as one page of HTML, or as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from search.reporting.digest import Table, digest_of
from search.reporting.figures.pictures import CHAPTERS, Picture
from search.reporting.figures.style import fit_page
from search.reporting.record import MissingData, StudyRecord
from search.study.opening import now_utc


@dataclass(frozen=True)
class Drawn:
    """A figure ready to be put on a page, or the reason why there is none."""

    key: str
    title: str
    facts: str
    reading: str
    height: int
    data: Markup | None
    """JSON that is safe inside a script element."""


@dataclass(frozen=True)
class DrawnChapter:
    """Figures under their question."""

    question: str
    drawn: Sequence[Drawn]


def to_html(record: StudyRecord, folder: Path | None = None) -> str:
    """One file of some 5 MB, nearly all of it plotly.js; needs no network. `folder` is where best.json lies.

    Cost: a fit of the standings per trial; a second or two at 200 trials.
    """
    from plotly.offline import get_plotlyjs

    return (
        _environment(escape=True)
        .get_template("report.html.j2")
        .render(
            digest=digest_of(record, folder),
            chapters=_chapters(record),
            plotly_js=Markup(get_plotlyjs()),
            written_at=now_utc(),
        )
    )


def to_markdown(record: StudyRecord, folder: Path | None = None) -> str:
    """The same without pictures: what each figure says, and the tables."""
    template = _environment(escape=False).get_template("report.md.j2")
    return _tidy(template.render(digest=digest_of(record, folder), chapters=_chapters(record)))


def to_short_markdown(record: StudyRecord, folder: Path | None = None) -> str:
    """A block to paste into an issue: verdict, numbers, mask, and what it was measured on, folded."""
    return _tidy(_environment(escape=False).get_template("short.md.j2").render(digest=digest_of(record, folder)))


def plain_markdown(text: str) -> str:
    """The text on one line, as Markdown that shows it as it is; also in a table's cell."""
    text = re.sub(r"([\\`*_<>\[\]#|~])", r"\\\1", " ".join(text.split()))
    return text.replace("@", "@\u200b")  # nobody is notified by a pasted report


def _chapters(record: StudyRecord) -> list[DrawnChapter]:
    return [DrawnChapter(one.question, [_draw(picture, record) for picture in one.pictures]) for one in CHAPTERS]


def _draw(picture: Picture, record: StudyRecord) -> Drawn:
    try:
        figure = fit_page(picture.draw(record))
    except MissingData as missing:
        return Drawn(picture.key, picture.title, str(missing), picture.reading, 0, None)
    about = figure.layout.meta
    return Drawn(
        picture.key, about["title"], about["facts"], picture.reading, int(figure.layout.height), _script_json(figure)
    )


def _script_json(figure: go.Figure) -> Markup:
    """`</script>` or `<!--` in a text must not end the element that holds it."""
    text = json.dumps(json.loads(figure.to_json()), separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _environment(*, escape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("search.reporting"),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"plain": plain_markdown, "block": _code_block, "table": markdown_table}
    return environment


def _code_block(text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text.strip(chr(10))}\n{fence}"


def markdown_table(table: Table) -> str:
    """The rows as Markdown, without title and note."""
    header, *rows = (tuple(map(plain_markdown, row)) for row in (table.header, *table.rows))
    lines = [header, ("---", *("---:",) * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _tidy(text: str) -> str:
    """No more than one empty line in a row."""
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
