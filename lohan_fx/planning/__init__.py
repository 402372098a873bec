"""planning: from numbers to a ``Plan``: what shares memory, what each choice takes, and the search among them."""
