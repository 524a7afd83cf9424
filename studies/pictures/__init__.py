"""What a person sees of this project, as pictures for the READMEs, and the script that makes them."""
