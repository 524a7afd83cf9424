"""What a mask's draft would say at every position of the target's own text, without decoding under it."""

from layerskip.analysis.teacher_forcing.base import DraftReadings, TeacherForcing, WrongDraft
from layerskip.analysis.teacher_forcing.choice import make_teacher_forcing
from layerskip.analysis.teacher_forcing.layerwise import LayerwiseForcing
from layerskip.analysis.teacher_forcing.rows import ForcedText
from layerskip.analysis.teacher_forcing.trees import TreeReadings

__all__ = [
    "DraftReadings",
    "ForcedText",
    "LayerwiseForcing",
    "TeacherForcing",
    "TreeReadings",
    "WrongDraft",
    "make_teacher_forcing",
]
