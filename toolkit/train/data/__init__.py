"""Text to samples: sources of documents, the tokenizer, the token cache, and which sample belongs to which step.

    sources -> pieces -> pool of workers (encoder) -> tokens.prepare() -> TokenCorpus -> Samples -> Prefetcher

Everything up to the Prefetcher imports without torch, so that worker processes start in a fraction of a second.
"""
