"""What a person runs: imports all other packages, and none imports it."""
