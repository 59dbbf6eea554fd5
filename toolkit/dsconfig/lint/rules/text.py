"""DS0: what is wrong with the text of a file. The readers find these."""

from toolkit.dsconfig.lint.finding import ERROR, WARNING, Rule

_STRICT = "DeepSpeed reads its file with hjson, which allows it; the Trainer and Accelerator read JSON, and stop."

RULES = (
    Rule(
        id="DS001",
        severity=WARNING,
        title="A comment in JSON",
        effect=_STRICT,
        mend="Remove the comments, or keep them in a file beside it.",
        example='{\n  // one GPU\n  "train_micro_batch_size_per_gpu": 4\n}',
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/653",),
    ),
    Rule(
        id="DS002",
        severity=WARNING,
        title="A comma after the last value",
        effect=_STRICT,
        mend="Remove the comma.",
        example='{"train_micro_batch_size_per_gpu": 4,}',
        fixable=True,
    ),
    Rule(
        id="DS003",
        severity=ERROR,
        title="True, False or None",
        effect="JSON readers stop. hjson takes it, with the comma behind it, as a text: `False,` is then true.",
        mend="Write true, false or null.",
        example='{"train_micro_batch_size_per_gpu": 4, "prescale_gradients": False}',
        fixable=True,
    ),
    Rule(
        id="DS004",
        severity=ERROR,
        title="NaN or Infinity",
        effect="Python's JSON takes it as a number; hjson, with which DeepSpeed reads its file, as a text or not at"
        " all.",
        mend="Write a finite number, or null.",
        example='{"train_micro_batch_size_per_gpu": 4, "steps_per_print": Infinity}',
    ),
    Rule(
        id="DS005",
        severity=ERROR,
        title="A key is given twice",
        effect="DeepSpeed raises ValueError. The Trainer and Accelerator keep the last one and say nothing.",
        mend="Keep one of them.",
        example='{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "gradient_clipping": 0.5}',
    ),
    Rule(
        id="DS006",
        severity=WARNING,
        title="A byte order mark",
        effect=_STRICT,
        mend="Save the file as UTF-8 without a byte order mark.",
        example='\ufeff{"train_micro_batch_size_per_gpu": 4}',
        fixable=True,
    ),
)
