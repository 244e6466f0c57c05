"""One module for each row of the table."""
