"""Who drafts, and when."""
