"""The figures of a study in the order of reading, each with the sentence that says what to read from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import plotly.graph_objects as go

from search.reporting.figures.decoding import acceptance_figure, held_out_figure, position_figure, time_figure
from search.reporting.figures.machine import machine_figure, surface_figure
from search.reporting.figures.masks import mask_figure
from search.reporting.figures.outlook import cost_figure, sensitivity_figure
from search.reporting.figures.trials import convergence_figure, prediction_figure
from search.reporting.record import StudyRecord


@dataclass(frozen=True)
class Picture:
    """One figure."""

    key: str
    """Anchor in the page, and the id that the dashboard keeps it under."""
    draw: Callable[[StudyRecord], go.Figure]
    """Raises MissingData where the study does not keep what it draws."""
    title: str
    """Where it could not be drawn."""
    reading: str
    """What to read from it, in a sentence or two."""


@dataclass(frozen=True)
class Chapter:
    """Figures that answer one question."""

    question: str
    pictures: tuple[Picture, ...]


CHAPTERS = (
    Chapter(
        "Is it faster?",
        (
            Picture(
                "held-out-prompts",
                held_out_figure,
                "Plain against speculative, prompt by prompt",
                "Each row is a held-out prompt. Where the filled diamond lies right of the open circle, speculative "
                "decoding was faster; thin bars span the passes. Prompts differ: a single one may gain much, or lose.",
            ),
            Picture(
                "speedup-over-position",
                position_figure,
                "Speedup over position",
                "A bar is the gain on the tokens at that place of the texts, the line that on all tokens up to there. "
                "Where the line still climbs at its end, expect more of longer answers, and less of shorter ones. It "
                "is the gain over all tokens together, where the verdict weighs every prompt alike.",
            ),
            Picture(
                "speedup-by-trial",
                convergence_figure,
                "Speedup by trial",
                "Points are single trials on a few tuning prompts, so the highest one was lucky. Trust the line, a "
                "lower bound over all trials of what leads; once it is flat, more trials change little. The diamond "
                "comes from held-out prompts.",
            ),
        ),
    ),
    Chapter(
        "What does it skip?",
        (
            Picture(
                "mask",
                mask_figure,
                "The mask, and those tried",
                "A column is a trial, the wide one at the right the chosen mask, whose crosses are left out while "
                "drafting. A stripe that stays dark is a sublayer that the search learnt, or knew, to keep; scattered "
                "rows are where it tried both.",
            ),
            Picture(
                "which-sublayers-matter",
                sensitivity_figure,
                "Which sublayers matter",
                "Above: a low point is a sublayer whose loss costs the most agreement, so it is kept first. Below: "
                "what a sublayer adds to a thin draft.",
            ),
        ),
    ),
    Chapter(
        "Where does the speed come from?",
        (
            Picture(
                "acceptance-by-position",
                acceptance_figure,
                "Acceptance by draft position",
                "A bar is as high as that position was drafted; its solid part was accepted. Once little is accepted, "
                "a larger gamma gains nothing.",
            ),
            Picture(
                "where-the-time-goes",
                time_figure,
                "Where the time goes",
                "The second bar against the first is the gain over all tokens together, where the verdict weighs every "
                "prompt alike. The last two are the best possible for this acceptance: "
                "had verifying cost one target step, and had drafting been free as well. That is the room which a "
                "better engine or a cheaper draft has left.",
            ),
            Picture(
                "gamma-and-threshold",
                surface_figure,
                "Gamma and threshold around the chosen mask",
                "Darker is faster, as predicted from one reading of the draft. A broad dark field means that the "
                "setting need not be hit exactly; circles are settings that were measured.",
            ),
            Picture(
                "what-a-step-costs",
                cost_figure,
                "What a step costs",
                "The flatter the upper curve, the cheaper it is to verify many tokens at once; the shorter the lower "
                "bar, the cheaper a draft token is before anything is skipped.",
            ),
        ),
    ),
    Chapter(
        "Can the numbers be trusted?",
        (
            Picture(
                "predicted-and-measured",
                prediction_figure,
                "Predicted against measured",
                "On the dotted line a prediction came true. A cloud beside it is a bias that the search corrects; one "
                "without a slope means that predictions did not help here.",
            ),
            Picture(
                "noise-and-drift",
                machine_figure,
                "Noise and drift of the machine",
                "Circles wander as the machine's own speed does. Diamonds, where a config was measured again on the "
                "same text, show that a paired ratio, taken in turns, does not follow it.",
            ),
        ),
    ),
)
PICTURES = tuple(picture for chapter in CHAPTERS for picture in chapter.pictures)
