"""Names of a benchmark's rows. Imports nothing: `--help` and bad input are to be answered at once."""

HF_GENERATE, HF_COMPILED = "hf_generate", "hf_generate_compiled"
HF_EARLY_EXIT, HF_PROMPT_LOOKUP, HF_ASSISTANT, HF_MTP = "hf_early_exit", "hf_prompt_lookup", "hf_assistant", "hf_mtp"
PLAIN, FREE_RUNNING, SPECULATIVE = "plain", "plain_free_running", "speculative"
LAYER_SKIP, PROMPT_LOOKUP, SUFFIX, HYBRID = "layer_skip", "prompt_lookup", "suffix", "hybrid"
EAGLE, MTP, DRAFT_MODEL = "eagle", "mtp", "draft_model"
"""Single drafters beside the config: its mask or weights, lookups, and n-grams where they match, else those."""

HF_ROWS = (HF_GENERATE, HF_COMPILED, HF_EARLY_EXIT, HF_ASSISTANT, HF_MTP, HF_PROMPT_LOOKUP)
OWN_ROWS = (PLAIN, FREE_RUNNING, SPECULATIVE, LAYER_SKIP, EAGLE, MTP, DRAFT_MODEL, PROMPT_LOOKUP, SUFFIX, HYBRID)
LOSSY = "lossy"
"""Where the config has a lossy rule: that, beside the lossless rows, `speculative` being the config without it."""
BASELINES = (HF_GENERATE, PLAIN, FREE_RUNNING)
"""What every row is held against."""
ROW_NAMES = (*HF_ROWS, *OWN_ROWS)
"""In the order of the table."""
ALL_ROWS = (*ROW_NAMES, LOSSY)
"""With the one that only a lossy config has."""
