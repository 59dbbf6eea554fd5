"""Tokens: the tokenizer, its worker processes, and the token cache that they fill."""
