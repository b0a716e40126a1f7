"""What a method returns: features, scores, and how they are saved."""
