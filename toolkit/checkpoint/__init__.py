"""Checkpoints that are independent of the layout: Hugging Face directories with the optimizer states beside the model.

    save, AsyncSaver     write, all ranks together: save.py → tensor_source.py, rank_writer.py, commit.py
    select_checkpoint    verify, and find the newest complete one: select.py, verify.py
    CheckpointReader     read slices of tensors: reader.py

Behind a URL (toolkit/remote_files.py) the same files are uploaded by the ranks that wrote them: remote_commit.py.

names.py describes the layout on disk.
"""
