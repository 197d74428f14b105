"""What proposes drafts: the draft model's worker; local drafters live in the router."""
