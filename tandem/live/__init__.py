"""An app of ours under load: started as a user would, steered through Ray, and its clients."""
