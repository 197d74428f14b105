"""Model execution: the target that verifies and the drafters that propose. Never imports ray."""
