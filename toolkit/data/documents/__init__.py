"""Documents: where texts, chats and prompts come from, in a fixed order, as chunks for tokenizer workers."""
