"""What a model version is and which transitions it may make. Pure."""
