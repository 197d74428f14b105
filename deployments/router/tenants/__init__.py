"""Who asks: API keys, what each may use, and how those that wait share a router."""
