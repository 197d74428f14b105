"""What only we can measure: draft lengths on one live app, the workers alone, 16-bit texts."""
