"""One round of drafting and verifying: how tokens are chosen and judged, and all of it as work for a device."""
