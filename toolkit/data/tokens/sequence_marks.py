"""What the byte beside each token of a cache says: whether it is trained on, or that it begins a sequence.

A document of preference data has one or two sequences, each with its own prompt. The first token of a sequence has
nothing before it and so is never a target: its byte is free to say that the sequence begins, and of which kind it is.
"""

TRAINED = 1
"""The token is a target."""
BEGINS = 2
"""The token begins a sequence: the chosen or rejected one of a pair, or a completion that is not desirable."""
BEGINS_DESIRABLE = 3
"""The token begins a completion that is desirable."""
