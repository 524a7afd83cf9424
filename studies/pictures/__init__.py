"""What a person sees of this project, as pictures for the READMEs, and the script that makes them."""

from studies.pictures.browser import take_picture

__all__ = ["take_picture"]
