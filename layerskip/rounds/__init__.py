"""One round of drafting and verifying, as work for a device."""
