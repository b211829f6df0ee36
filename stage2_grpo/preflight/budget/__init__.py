"""`budget`: how many tokens the episodes on the user's databases need, and what that means for limits and memory."""
