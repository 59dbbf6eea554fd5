"""Checkpoints that belong to the model: Hugging Face directories with the optimizer's states under the same names.

    save, AsyncSaver    write, all ranks together         save.py, async_saver.py
    verify, choose      what is whole, and the newest     verify.py, choose.py
    CheckpointReader    read, slice by slice              reader.py

names.py has the layout on disk. hf_directory.py writes a model alone.
"""
