"""Questions, network and page of the experiment on a language model."""
