"""The router: owns every sequence, pairs drafting with verification, streams the text."""
