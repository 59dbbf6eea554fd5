"""In and out: models and checkpoints of others become ours, and ours plain Hugging Face directories.

    export              a checkpoint as a directory for transformers        export.py
    same_as             does transformers compute the same with both?       reload.py
    open_deepspeed      ZeRO 1 to 3 and universal checkpoints, by name      deepspeed.py
    open_hugging_face   safetensors under Hugging Face names                hugging_face.py
    open_gguf           what transformers reads of llama.cpp's format       gguf.py

Nothing of a stranger is unpickled but plain data and tensors (scanned_pickle.py); nothing appears on the disk before
it is whole (new_directory.py).
"""
