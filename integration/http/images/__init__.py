"""Images in requests: from the text that a client sends to what the model's processor makes of them."""
