"""What a person runs: the `tandem` command."""
