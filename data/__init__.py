"""Questions with gold SQL and their databases: built-in demo or Spider layout, checked and split."""
