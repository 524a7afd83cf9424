"""A notebook, run on a study, as one page of HTML with its figures."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import plotly.io
from markdown_it import MarkdownIt
from nbclient import NotebookClient
from plotly.offline import get_plotlyjs
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_TIMEOUT_S = 600
_FIGURE = "application/vnd.plotly.v1+json"
_CODE_LOOK = HtmlFormatter(style="default")
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #222; background: white; margin: 0 auto; max-width: 960px; }
section { padding: 8px 16px; background: white; }
pre { margin: 0; font: 12.5px/1.45 monospace; white-space: pre-wrap; }
.code { border: 1px solid #ddd; border-radius: 4px; background: #f7f7f7; padding: 6px 10px; margin: 8px 0; }
.output { padding: 2px 10px; margin: 4px 0 10px; overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; }
th, td { padding: 2px 8px; text-align: right; border: 0; border-bottom: 1px solid #eee; }
code { background: #f3f3f3; padding: 0 3px; }
"""


def notebook_page(notebook: Path, study: Path) -> str:
    """Run top to bottom on this study; a section for each heading, with an id made of its words.

    Cost: starts a kernel, some 20 s on the demo. Raises: RuntimeError in one line if a cell fails.
    """
    read = nbformat.read(notebook, as_version=4)
    client = NotebookClient(
        read,
        timeout=_TIMEOUT_S,
        startup_timeout=_TIMEOUT_S,
        resources={"metadata": {"path": str(notebook.parent)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns that others on this machine might listen
    )
    with _environment({"LAYERSKIP_STUDY": str(study.resolve())}):
        try:
            client.execute()
        except Exception as error:
            raise RuntimeError(f"{notebook.name}: {str(error).strip().splitlines()[-1]}") from error
    body = "".join(_section(name, cells) for name, cells in _sections(read.cells))
    style = _STYLE + _CODE_LOOK.get_style_defs(".code")
    head = f'<meta charset="utf-8"><title>{notebook.stem}</title><style>{style}</style>'
    return f"<!doctype html><html><head>{head}<script>{get_plotlyjs()}</script></head><body>{body}</body></html>"


def _sections(cells: list[Any]) -> list[tuple[str, list[Any]]]:
    """Cells under each heading: (its words as an id, cells)."""
    found: list[tuple[str, list[Any]]] = []
    for cell in cells:
        heading = re.match(r"#+ (.*)", cell.source) if cell.cell_type == "markdown" else None
        if heading or not found:
            words = heading[1] if heading else "top"
            found.append((re.sub(r"\W+", "-", words.lower()).strip("-"), []))
        found[-1][1].append(cell)
    return found


def _section(name: str, cells: list[Any]) -> str:
    return f'<section id="{name}">{"".join(map(_cell, cells))}</section>'


def _cell(cell: Any) -> str:
    if cell.cell_type == "markdown":
        return str(MarkdownIt().render(cell.source))
    code = highlight(cell.source, PythonLexer(), _CODE_LOOK)
    outputs = "".join(f'<div class="output">{_output(output)}</div>' for output in cell.outputs)
    return f'<div class="code">{code}</div>{outputs}'


def _output(output: Mapping[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"<pre>{html.escape(output['text'])}</pre>"
    data = output.get("data", {})
    if _FIGURE in data:
        figure = plotly.io.from_json(json.dumps({key: data[_FIGURE][key] for key in ("data", "layout")}))
        return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False}))
    return str(data["text/html"]) if "text/html" in data else f"<pre>{html.escape(data.get('text/plain', ''))}</pre>"


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """The kernel inherits it."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
