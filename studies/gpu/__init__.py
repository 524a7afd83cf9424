"""The GPU study: one script that trains, searches, compares and measures within half an hour; see README.md."""
