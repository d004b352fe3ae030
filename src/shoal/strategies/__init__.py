"""One file, one way to do a step. Strategies know the model and the group, not who started them."""
