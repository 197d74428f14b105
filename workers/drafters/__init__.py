"""What proposes drafts: a smaller model today."""
