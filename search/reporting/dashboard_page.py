"""Figures and a note on a study's page of optuna-dashboard: made of what the study stores, and stored in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress

import optuna
import plotly.graph_objects as go

from layerskip.config.decode_config import DecodeConfig
from search.reporting.digest import regimes_table
from search.reporting.figures.pictures import PICTURES
from search.reporting.figures.style import fit_card
from search.reporting.record import MissingData, StudyRecord, read_record
from search.reporting.render import markdown_table, plain_markdown
from search.reporting.verdict import verdict_of
from search.study.attributes import CANNOT_WIN, COMMAND, CONFIG, PLAIN_TOKENS_PER_S
from search.study.config_words import describe

FIGURES: dict[str, Callable[[StudyRecord], go.Figure]] = {picture.key: picture.draw for picture in PICTURES}
"""By the id that a figure is stored under; the report's, in its order."""
YOURS = "*Written by the search, anew at the end of every run. What stands below this line is yours and stays.*"


def push_figures(study: optuna.Study) -> list[str]:
    """Draw the figures that the study has data for and store them and the note in it; returns the figures' ids.

    Earlier ones are replaced; what a person wrote into the note is kept.
    Cost: a fit of the standings per trial, and a row per 2 kB; with 12 layers 60 kB and 0.5 s at 30 trials, 150 kB and
    two seconds at 200.
    Raises: whatever the storage or the dashboard's package raises; what was stored until then stays.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dashboard's dependencies warn of their own future
        from optuna_dashboard import get_note, save_note, save_plotly_graph_object
    record = read_record(study)
    save_note(study, note(record, get_note(study)))
    pushed = []
    for name, draw in FIGURES.items():
        with suppress(MissingData):
            pushed.append(str(save_plotly_graph_object(study, fit_card(draw(record)), graph_object_id=name)))
    return pushed


def note(record: StudyRecord, earlier: str = "") -> str:
    """Markdown: verdict, best config, the command; below a line what a person added to the earlier note."""
    parts = [_verdict(record), _config(record)]
    if (table := regimes_table(record.attrs)) is not None:
        parts.append(markdown_table(table))
    if (command := record.attrs.get(COMMAND)) is not None:
        parts.append(f"Made by\n\n```\n{command}\n```")
    _, ours, yours = earlier.rpartition(YOURS)
    return "\n\n".join([*parts, "---", YOURS, (yours if ours else earlier).strip()])


def _verdict(record: StudyRecord) -> str:
    """One line."""
    headline, sentence = verdict_of(record)
    text = f"**{headline}**: {plain_markdown(sentence)}"
    if (reason := record.attrs.get(CANNOT_WIN)) is not None:
        text += f" The search was cut short: {plain_markdown(reason)}."
    if (plain := record.attrs.get(PLAIN_TOKENS_PER_S)) is not None:
        text += f" Plain decoding of the tuning prompts: {plain:.1f} tokens/s."
    return text


def _config(record: StudyRecord) -> str:
    """One line: the exported config where there is one, else what leads on the tuning prompts."""
    stored, leader = record.attrs.get(CONFIG), record.leader
    if stored is not None and (config := DecodeConfig(**stored)).speculates:
        return f"Best config: `{describe(config)}`"
    if leader is None:
        return "Best config: none was measured in full."
    return (
        f"Best on the tuning prompts: `{describe(leader.config)}`, {leader.speedup:.2f} times as fast "
        f"({len(leader.trials)} trials pooled, lower bound {leader.lower:.2f})"
    )
