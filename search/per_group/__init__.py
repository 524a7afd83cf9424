"""One decode setting per prompt group: the searches, the matrix of settings against groups, the export."""
