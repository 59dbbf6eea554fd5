"""Import and export: models and checkpoints of other programs become ours, and ours plain Hugging Face directories.

    export_checkpoint   a checkpoint as a Hugging Face directory                   export_model.py
    compare_models      do two model directories compute the same?                 model_comparison.py
    import_weights      Hugging Face, GGUF or DeepSpeed weights                    import_weights.py
    import_run          a DeepSpeed checkpoint with its optimizer, to be resumed   import_run.py
    recipe_of_setup     the recipe of another program's arguments                  setups/recipe_of_setup.py
    open_deepspeed      ZeRO 1 to 3 and universal checkpoints, by parameter        deepspeed_checkpoint.py

Of untrusted pickles only plain data and tensors are unpickled (deepspeed_partitions.py); a directory becomes visible
only when it is complete (toolkit/checkpoint/model_directory.py).
"""
