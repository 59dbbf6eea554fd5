"""Text to micro-batches: sources of documents, the tokenizer, the token cache, and the samples of each step.

    documents/  sources -> text chunks
    tokens/     -> tokenizer pool -> token_cache.prepare() -> TokenCorpus
    megatron/   datasets of Megatron-LM -> TokenCorpus
    samples/    -> Samples -> MicroBatchLoader

Everything up to TokenCorpus imports without torch, so that tokenizer workers start in a fraction of a second.
"""
