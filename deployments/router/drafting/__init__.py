"""The drafters: which of them drafts for a sequence, and when."""
