"""All predictions of one study, made before its first trial."""
