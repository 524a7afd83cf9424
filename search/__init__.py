"""Find the fastest lossless way to decode a causal language model on this device."""

from search.spec import StudyPaths, StudySpec, load_spec

__all__ = ["StudyPaths", "StudySpec", "load_spec"]
