"""Images for people, drawn of models and of the rows of tables."""
