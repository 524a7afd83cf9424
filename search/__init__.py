"""Find the fastest lossless way to decode a causal language model on this device."""

from search.study.spec import StudyPaths, StudySpec, load_spec
from search.tuner import SearchFailed, tune

__all__ = ["SearchFailed", "StudyPaths", "StudySpec", "load_spec", "tune"]
