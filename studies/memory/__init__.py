"""Whether resident memory stays flat: hundreds of trials of one search, an hour of one server."""
