"""Names of a benchmark's rows. Imports nothing: `--help` and bad input are to be answered at once."""

HF_GENERATE, HF_COMPILED = "hf_generate", "hf_generate_compiled"
HF_EARLY_EXIT, HF_PROMPT_LOOKUP = "hf_early_exit", "hf_prompt_lookup"
PLAIN, SPECULATIVE = "plain", "speculative"

HF_ROWS = (HF_GENERATE, HF_COMPILED, HF_EARLY_EXIT, HF_PROMPT_LOOKUP)
OWN_ROWS = (PLAIN, SPECULATIVE)
ROW_NAMES = (*HF_ROWS, *OWN_ROWS)
"""In the order of the table."""
