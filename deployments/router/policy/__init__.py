"""How far to speculate: pure decisions, without Ray or torch."""
