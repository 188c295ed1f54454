"""Images in prompts: what a processor gives, the features of a model's own encoder, and the rows that take them."""
