"""Questions and golds for any SQLite database, made from nothing but its schema and contents."""
